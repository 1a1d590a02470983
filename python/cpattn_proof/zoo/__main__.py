# SPDX-License-Identifier: Apache-2.0
"""Shows every bug of the zoo, and what its tool says of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from cpattn_terminal import streams
from cpattn_terminal.progress import make_progress

from .entry import TOOLS, Outcome, ZooEntry, visit
from .registry import all_entries

_DESCRIPTION = """Refute bugs of real engines and libraries, rebuilt small, and prove them mended.

Every line is an entry: a bug, the tool that refutes it, the invariant it names, and what it says; a
bug with two sides has two entries. Exit code 1 if a bug is not refuted by its invariant, or its
mended form is not proved."""
_EXAMPLES = """examples:
  python -m cpattn_proof.zoo                   all of them
  python -m cpattn_proof.zoo --tool lint       those of one tool
  python -m cpattn_proof.zoo --only sglang     those whose name has this in it
  python -m cpattn_proof.zoo --json            for programs"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tools, print the table; 0 if all is as it should be."""
    streams.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m cpattn_proof.zoo",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tool", choices=TOOLS, help="only what this tool refutes")
    parser.add_argument("--only", default="", metavar="TEXT", help="only names that contain it")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parser.parse_args(arguments)
    entries = [
        entry
        for entry in all_entries()
        if options.tool in (None, entry.tool) and options.only in entry.bug
    ]
    if not entries:
        parser.error(f"no bug of the zoo is called {options.only!r} or refuted by that tool")
    outcomes = _visit_all(entries)
    if options.json:
        print(json.dumps([outcome.as_dict() for outcome in outcomes], indent=2))
    else:
        _print(outcomes)
    return int(not all(outcome.holds for outcome in outcomes))


def _visit_all(entries: Sequence[ZooEntry]) -> list[Outcome]:
    outcomes = []
    with make_progress("cpattn_proof.zoo", "entries") as progress:
        for done, entry in enumerate(entries):
            progress(done, len(entries), entry.bug)
            outcomes.append(visit(entry))
    return outcomes


def _print(outcomes: Sequence[Outcome]) -> None:
    """A table, as wide as its longest line where it is not on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = streams.width()
    console = Console(width=width or (None if streams.is_terminal() else 160))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("bug", "tool", "id"):
        table.add_column(name, no_wrap=True)
    table.add_column("what the tool says")
    table.add_column("seconds", justify="right")
    for outcome in outcomes:
        entry = outcome.entry
        name = entry.bug if outcome.holds else f"! {entry.bug}"
        says = outcome.says if outcome.holds else f"{_fault(outcome)}; it says: {outcome.says}"
        table.add_row(name, entry.tool, entry.invariant, says, f"{outcome.seconds:.2f}")
    console.print(table)
    missed = sum(not outcome.holds for outcome in outcomes)
    verdict = f"{missed} not told apart" if missed else "all refuted, and proved once mended"
    entries, bugs = len(outcomes), len({outcome.entry.bug for outcome in outcomes})
    many = f"{entries} entr{'y' if entries == 1 else 'ies'} of {bugs} bug{'s' * (bugs > 1)}"
    console.print(f"\n{many}: {verdict}", markup=False)


def _fault(outcome: Outcome) -> str:
    """Say why an outcome does not hold."""
    if not outcome.refuted:
        return f"{outcome.entry.invariant} is not among the findings"
    return "the mended form is not proved"


if __name__ == "__main__":
    sys.exit(main())
