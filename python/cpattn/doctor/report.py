# SPDX-License-Identifier: Apache-2.0
"""All findings, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from .._core import __version__
from . import engines, environment, machine, self_test
from .finding import Finding

_MARKS = {"ok": "  ", "note": "- ", "warning": "! ", "broken": "x "}
_COLOURS = {"warning": "33", "broken": "31"}
_NAME_WIDTH = 16


def findings() -> Iterator[Finding]:
    """Return all findings in the order of the report."""
    return chain(
        machine.findings(), environment.findings(), engines.findings(), self_test.findings()
    )


def is_well(found: Sequence[Finding]) -> bool:
    """Tell whether everything required works; warnings do not count."""
    return all(finding.state != "broken" for finding in found)


def as_text(found: Sequence[Finding], width: int, *, colours: bool = False) -> str:
    """Return a wrapped line for each finding under the heading of its section, then a verdict."""
    lines: list[str] = []
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines += _wrapped(finding, width, colours)
    counts = {state: sum(f.state == state for f in found) for state in ("broken", "warning")}
    verdict = "All that cpattn needs works here."
    if counts["broken"]:
        verdict = f"{counts['broken']} broken: see the lines with x."
    elif counts["warning"]:
        many = counts["warning"] > 1
        verdict += f" {counts['warning']} warning{'s' * many}: see the line{'s' * many} with !."
    return "\n".join([*lines, "", *textwrap.wrap(verdict, width)])


def _wrapped(finding: Finding, width: int, colours: bool) -> list[str]:
    first = f"{_MARKS[finding.state]}{finding.name:<{_NAME_WIDTH}}"
    narrow = width < 3 * _NAME_WIDTH
    indent = "    " if narrow else " " * (len(_MARKS["ok"]) + _NAME_WIDTH)
    head = [first.rstrip()] if narrow else []
    options: dict[str, Any] = {
        "width": max(width, 20),
        "subsequent_indent": indent,
        "break_on_hyphens": False,
        "break_long_words": False,
    }
    lines = textwrap.wrap(finding.text, initial_indent=indent if narrow else first, **options)
    if finding.hint:
        lines += textwrap.wrap(f"-> {finding.hint}", initial_indent=indent, **options)
    lines = head + lines
    colour = _COLOURS.get(finding.state)
    return [f"\x1b[{colour}m{line}\x1b[0m" for line in lines] if colours and colour else lines


def as_json(found: Sequence[Finding]) -> str:
    """Return the content of `as_text` as JSON."""
    content = {
        "cpattn": __version__,
        "passed": is_well(found),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
    return json.dumps(content, indent=1)
