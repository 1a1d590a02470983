# SPDX-License-Identifier: Apache-2.0
"""Runs of `cpattn plan` in this process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from support.command_line import invoke

RATES = ("--gflops", "900", "--threads", "4")
plan = partial(invoke, "plan")


def report(path: Path, *arguments: str) -> dict[str, Any]:
    """What the command writes to a JSON file."""
    result = plan(*arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())
