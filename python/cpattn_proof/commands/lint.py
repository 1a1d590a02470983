# SPDX-License-Identifier: Apache-2.0
"""`cpattn lint`: refutes or proves plans of all ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpattn_terminal.command_group import CommandGroup
from cpattn_terminal.options import Integer, OutputPath, PoolPlacement, writing

from .options import require_option
from .page_option import html_option, write_page

if TYPE_CHECKING:
    from ..findings import Report

CommandGroup.examples["lint"] = "cpattn lint plan.json"


@click.command(short_help="Refute or prove what all ranks of a batch planned.")
@click.argument("plans", nargs=-1, metavar="PLAN...", type=click.Path(path_type=Path))
@click.option(
    "--capture",
    "captures",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Check the batches of a recorded run, too; give it once for each rank.",
)
@click.option(
    "--ranks", type=Integer(1, 1024), help="Plan the batches of --capture for so many ranks."
)
@click.option(
    "--strategy",
    type=click.Choice(("zigzag", "interleave", "contiguous")),
    help="Strategy for planning the batches of --capture.",
)
@click.option(
    "--placement",
    type=PoolPlacement(),
    help="Placement for planning the batches of --capture.",
)
@require_option
@html_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, for programs."
)
@click.option(
    "--shrink-to",
    type=OutputPath(),
    help="Write the smallest part of the first plan with a finding that still shows it.",
)
def lint(
    plans: tuple[Path, ...],
    captures: tuple[Path, ...],
    ranks: int | None,
    strategy: str | None,
    placement: str | None,
    required: tuple[str, ...],
    html_path: Path | None,
    as_json: bool,
    shrink_to: Path | None,
) -> None:
    """Refute or prove what all ranks of a batch planned, from integers alone.

    A PLAN is a JSON document of the schema cpattn-plan/1: requests, and for each rank its tokens,
    the keys that they see, pages and slots, collectives, merges and transfers. What a document
    leaves out is not checked, and the answer says so. docs/proof/lint.md has the format, and
    cpattn_proof.linting.adapters make documents of plans of cpattn, sglang, vLLM, ring-flash-attn
    and Megatron.

    Exit code 0 if all that was checked holds, 1 if something does not, 2 if a file is no plan,
    nothing in it can be checked, or --require names what was not.

    \b
    One plan:
      cpattn lint plan.json
    In CI, where attention has to be among what is checked:
      cpattn lint --require OWN,COV plan.json
    Several, for a program:
      cpattn lint --json first.json second.json
    The smallest batch that shows the first fault:
      cpattn lint plan.json --shrink-to small.json
    What two ranks of an engine planned under cpattn.captures.capture:
      cpattn lint --capture run.0.cpcap --capture run.1.cpcap
    The same batches, had 16 ranks shared out their keys:
      cpattn lint --capture run.0.cpcap --ranks 16 --placement token_interleave:16
    """
    if not plans and not captures:
        raise click.UsageError("a PLAN or --capture must be given")
    other = {"ranks": ranks, "strategy": strategy, "placement": placement}
    other = {name: value for name, value in other.items() if value is not None}
    if other and not captures:
        raise click.UsageError(f"--{next(iter(other))} is of the batches of --capture")
    from ..findings import NOT_USABLE, NotUsable
    from ..linting.linter import lint as judge
    from ..requirements import require

    reports: list[Report] = []
    status = 0
    for read in (*(partial(_of_file, plan) for plan in plans), partial(_recorded, captures, other)):
        try:
            judged = map(judge, read())
            reports += (require(one, required) for one in judged) if required else judged
        except NotUsable as error:
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            status = NOT_USABLE
    status = max([status, *(report.exit_code for report in reports)])
    if as_json:
        documents = [report.as_dict() for report in reports]
        whole: Any = documents[0] if len(plans) == len(documents) == 1 else documents
        click.echo(json.dumps(whole, allow_nan=False, indent=2))
    else:
        click.echo("\n\n".join(map(_text, reports)), nl=bool(reports))
    if shrink_to is not None:
        _write_smaller(reports, shrink_to, quiet=as_json)
    write_page(reports, html_path)
    click.get_current_context().exit(status)


def _of_file(plan: Path) -> list[Any]:
    return [plan]


def _recorded(captures: tuple[Path, ...], other: dict[str, Any]) -> list[Any]:
    """The documents of recorded runs, or of their batches planned otherwise."""
    from ..captures import read_captures
    from ..linting.adapters.captures import from_capture

    if not captures:
        return []
    run = read_captures(captures)
    if other:
        from ..captures.remade import planned_again  # needs cpattn

        run = planned_again(run, **other)
    return from_capture(run)


def _text(report: Report) -> str:
    """A report, and how small a part of the plan shows each finding."""
    lines = [
        f"  smaller: {found.kind} shows with {_size(found.details['smaller'])}"
        for found in report.findings
    ]
    return "\n".join([report.text(), *lines])


def _size(document: dict[str, Any]) -> str:
    """Return the size of a document, such as "1 request of 3 new tokens and 2 ranks"."""
    requests = document.get("requests", ())
    tokens = sum(request["extend"] for request in requests)
    parts = [f"{len(requests)} request{'s' * (len(requests) != 1)} of {tokens} new tokens"]
    parts += [f"{len(document['ranks'])} ranks"] if "ranks" in document else []
    parts += [f"{len(document['transfers'])} transfers"] if "transfers" in document else []
    return " and ".join(parts if requests else parts[1:]) or "the document"


def _write_smaller(reports: list[Report], path: Path, *, quiet: bool) -> None:
    """Write the smaller document of the first finding, if there is one."""
    found = next((found for report in reports for found in report.findings), None)
    if found is None:
        return
    with writing(path):
        path.write_text(json.dumps(found.details["smaller"], indent=1) + "\n", encoding="utf-8")
    if not quiet:
        click.echo(f"{found.kind}: smaller plan written to {path}")
