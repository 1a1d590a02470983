# SPDX-License-Identifier: Apache-2.0
"""A line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Only what is broken makes the exit code 1.
State = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """State of one thing; `hint` says what to do about it, as a command where there is one."""

    section: str
    name: str
    text: str
    state: State = "ok"
    hint: str = ""
