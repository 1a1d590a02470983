# SPDX-License-Identifier: Apache-2.0
"""Line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Only broken things make the exit code 1.
State = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """State of one thing; `hint` says how to fix it, as a command if there is one."""

    section: str
    name: str
    text: str
    state: State = "ok"
    hint: str = ""
