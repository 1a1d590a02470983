# SPDX-License-Identifier: Apache-2.0
"""Recorded runs for `cpattn replay --capture` and `cpattn plan --capture`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from click.core import ParameterSource

from cpattn_terminal.options import writing
from cpattn_terminal.tables import Row, print_table

from ..captures import Capture, read_captures
from ..findings import NOT_USABLE, NotUsable

_DECODE = "ContextParallel.plan_decode"
_OTHER_OPTIONS = ("captures", "json_path")


def replay_captures(paths: Sequence[Path], json_path: Path | None) -> None:
    """Make the plans of captures again, print what differs, and end with the exit code."""
    context = click.get_current_context()
    for name, source in ((name, context.get_parameter_source(name)) for name in context.params):
        if source is ParameterSource.COMMANDLINE and name not in _OTHER_OPTIONS:
            raise click.UsageError(
                "--capture makes recorded plans again: beside it goes --json alone"
            )
    with not_usable():
        from ..captures.remade import remake  # needs cpattn

        capture = read_captures(paths)
        report, kinds = remake(capture)
    header = ("call", "plans", "recorded µs", "here µs", "left out", "different")
    rows = [Row(kind.row()) for kind in kinds]
    for line in _lines_on(capture):
        click.echo(line)
    if rows:
        print_table(
            "Plans made again", header, rows, less_important=("left out",), left=("call",)
        )  # fmt: skip
    click.echo(report.text())
    if json_path:
        with writing(json_path):
            json_path.write_text(report.to_json() + "\n", encoding="utf-8")
    context.exit(report.exit_code)


def recorded_batches(paths: Sequence[Path]) -> list[tuple[list[int], list[int]]]:
    """The batches with new tokens in captures, as (extend_lens, seq_lens)."""
    with not_usable():
        batches = [
            (batch.extend_lens, batch.seq_lens)
            for batch in read_captures(paths).batches
            if any(batch.extend_lens) and batch.call.name != _DECODE
        ]
        if not batches:
            raise NotUsable("--capture: there is no batch with new tokens in it")
    return batches


def largest_step(paths: Sequence[Path]) -> list[int]:
    """The tokens before the new one of each sequence, in the recorded decode step of most keys."""
    with not_usable():
        steps = [batch for batch in read_captures(paths).batches if batch.call.name == _DECODE]
        if not steps:
            raise NotUsable(f"--decode recorded: there is no call of {_DECODE} in --capture")
        step = max(steps, key=lambda batch: sum(batch.seq_lens))
        if set(step.extend_lens) != {1}:
            raise NotUsable("--decode recorded: sequences must have one new token each")
    return [length - 1 for length in step.seq_lens]


def _lines_on(capture: Capture) -> Iterator[str]:
    for header in capture.headers:
        calls = [call for call in capture.calls if call.rank == header["rank"]]
        end = max((call.at + call.seconds for call in calls), default=0.0)
        yield (
            f"rank {header['rank']}: {len(calls):,} calls in {end:.3f} s, "
            f"cpattn {header['cpattn']}, {header['isa']}, {header['host']}"
        )
    for path in capture.truncated:
        yield f"{path}: its last line is not whole, its process was ended"


@contextmanager
def not_usable() -> Iterator[None]:
    """End with one line and the exit code of what cannot be judged."""
    try:
        yield
    except NotUsable as error:
        raise _NotUsable(str(error)) from None


class _NotUsable(click.ClickException):
    exit_code = NOT_USABLE
