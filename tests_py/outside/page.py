# SPDX-License-Identifier: Apache-2.0
"""Table of suites, in a terminal and on docs/proof/outside.md."""

from collections.abc import Mapping
from typing import Any

from outside import archive
from support.places import ROOT

PAGE = ROOT / "docs" / "proof" / "outside.md"
BEGIN, END = "<!-- outside: make test-outside -->\n", "<!-- end of outside -->\n"
HEAD = ("Suite", "Release", "Cases", "Run", "Passed", "Failed", "Not expressible", "Not compared")


def rows(suites: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    made = []
    for entry in suites.values():
        ran = entry["passed"] + entry["failed"]
        left_out = entry["not_expressible"]
        numbers = (ran + sum(left_out.values()), ran, entry["passed"], entry["failed"])
        reasons = [
            ", ".join(f"{count} {reason}" for reason, count in sorted(found.items())) or "-"
            for found in (left_out, entry["not_compared"])
        ]
        release = archive.release(entry).replace("==", " ")
        made.append((entry["title"], release, *map(str, numbers), *reasons))
    return made


def aligned(cells: list[tuple[str, ...]]) -> str:
    table = [HEAD, *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(lines)


def markdown(suites: Mapping[str, Mapping[str, Any]]) -> str:
    rule = ("---", "---", "--:", "--:", "--:", "--:", "---", "---")
    return "".join(f"| {' | '.join(row)} |\n" for row in [HEAD, rule, *rows(suites)])


def write(suites: Mapping[str, Mapping[str, Any]]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + markdown(suites) + "\n" + END + rest.partition(END)[2])
