# SPDX-License-Identifier: Apache-2.0
"""`cpattn zoo`: every bug of the zoo, and what its tool says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from cpattn_terminal import streams
from cpattn_terminal.command_group import CommandGroup
from cpattn_terminal.progress import make_progress

from ..zoo.entry import TOOLS, Outcome, ZooEntry, visit
from ..zoo.registry import all_entries

CommandGroup.examples["zoo"] = "cpattn zoo --tool lint"


@click.command(short_help="Refute bugs that engines shipped, rebuilt small.")
@click.option("--tool", type=click.Choice(TOOLS), help="Show only bugs that this tool refutes.")
@click.option(
    "--only", default="", metavar="TEXT", help="Show only bugs whose names contain this text."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, for programs."
)
def zoo(tool: str | None, only: str, as_json: bool) -> None:
    """Refute bugs of real engines and libraries, rebuilt small, and prove them mended.

    Every line is an entry: a bug, the tool that refutes it, the invariant it names, and what it
    says; a bug with two sides has two entries. Exit code 1 if a bug is not refuted by its
    invariant, or its mended form is not proved.

    \b
    All of them, in a minute:
      cpattn zoo
    Those of one tool:
      cpattn zoo --tool lint
    Those whose name has this in it:
      cpattn zoo --only sglang
    """
    entries = [one for one in all_entries((tool,) if tool else TOOLS) if only in one.bug]
    if not entries:
        raise click.UsageError(f"no bug of the zoo is called {only!r} or refuted by that tool")
    outcomes = _visit_all(entries)
    if as_json:
        click.echo(json.dumps([outcome.as_dict() for outcome in outcomes], indent=2))
    else:
        _print(outcomes)
    if not all(outcome.holds for outcome in outcomes):
        click.get_current_context().exit(1)


def _visit_all(entries: Sequence[ZooEntry]) -> list[Outcome]:
    outcomes = []
    with make_progress("cpattn zoo", "entries") as progress:
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
