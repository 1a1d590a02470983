# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/proof/zoo.md: every bug of the zoo, and what its tool says of it.

The second one is of bugs that releases have, whose own code was run; what was said of it is in the
entry, and held against the code by the test that the table names.

Seconds are those of this machine. `--check` writes nothing and fails where the page has another
table, seconds left out.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cpattn_proof.zoo.entry import Outcome, ZooEntry, visit
from cpattn_proof.zoo.registry import all_entries

PAGE = Path(__file__).parents[1] / "docs" / "proof" / "zoo.md"
BEGIN, END = "<!-- zoo: scripts/zoo_table.py -->\n", "<!-- end of zoo -->\n"
SHIPPED, SHIPPED_END = "<!-- shipped: scripts/zoo_table.py -->\n", "<!-- end of shipped -->\n"
_SECONDS = re.compile(r"\| [\d.]+ \|$", re.MULTILINE)
# Of the smallest case that was found in time, on this instruction set.
_ERROR = re.compile(r"(?<=off by )\S+")


def row(outcome: Outcome) -> str:
    entry = outcome.entry
    link = f"[{entry.bug}]({entry.link})"
    says = outcome.says.replace("|", "\\|")
    tool = f"[{entry.tool}]({entry.tool}.md)"
    id = f"[{entry.invariant}](invariants.md#{entry.invariant.lower()})"
    return f"| {link} | {entry.story} | {tool} | {id} | {says} | {outcome.seconds:.2f} |"


def table(outcomes: Sequence[Outcome]) -> str:
    head = (
        "| Bug | What broke | Tool | Id | What the tool says | Seconds |\n|---|---|---|---|---|--:|"
    )
    return "\n".join([head, *map(row, outcomes)]) + "\n"


def shipped_table(entries: Sequence[ZooEntry]) -> str:
    names = ("Bug", "Run of it", "Id", "What the tool says", "Proved with", "Test")
    head = f"| {' | '.join(names)} |\n{'|---' * len(names)}|"
    rows = []
    for entry in entries:
        if (shipped := entry.shipped) is None:
            continue
        id = f"[{entry.invariant}](invariants.md#{entry.invariant.lower()})"
        test = f"[{Path(shipped.test).name}](../../{shipped.test})"
        rows.append(
            f"| [{entry.bug}]({entry.link}) | {shipped.release}: {shipped.ran} | {id} "
            f"| {shipped.says} | {shipped.mend} | {test} |"
        )
    return "\n".join([head, *rows]) + "\n"


def between(text: str, begin: str, end: str, new: str) -> str:
    """The text with something else between two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{new}\n{end}{after}"


def with_table(text: str, outcomes: Sequence[Outcome]) -> str:
    """The page with what the tools say now."""
    shipped = shipped_table([outcome.entry for outcome in outcomes])
    return between(between(text, BEGIN, END, table(outcomes)), SHIPPED, SHIPPED_END, shipped)


def comparable(text: str) -> str:
    """The page without what depends on the machine."""
    return _ERROR.sub("#", _SECONDS.sub("| # |", text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args(arguments).check
    outcomes = [visit(entry) for entry in all_entries()]
    if wrong := [outcome.entry.bug for outcome in outcomes if not outcome.holds]:
        print(f"not told apart: {', '.join(wrong)}")
        return 1
    text = PAGE.read_text(encoding="utf-8")
    wanted = with_table(text, outcomes)
    if check and comparable(wanted) != comparable(text):
        print(f"{PAGE.name}: out of date; run python scripts/zoo_table.py")
        both = (comparable(page).splitlines() for page in (text, wanted))
        print("\n".join(difflib.unified_diff(*both, "the page", "now", n=0, lineterm="")))
        return 1
    if not check:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
