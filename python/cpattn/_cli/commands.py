# SPDX-License-Identifier: Apache-2.0
"""The command `cpattn`, which modules of commands add to, and what needs no module of its own.

What commands need beyond click is imported when they run.
"""

from __future__ import annotations

import os

import click

from .._core import __version__
from .._limits import MAX_RANKS, check_batch
from .._terminal import streams
from .command_group import CommandGroup, refusals_by_option
from .declarations import STRATEGIES, option
from .options import Integer, IntegerList

_DOCUMENTS = """\b
cpattn COMMAND --help has all options, and more examples.
Between machines:
  torchrun --nproc-per-node 2 -m cpattn.distributed.check

Documents, in the folder of the sources: docs/index.md, docs/tutorials, docs/command_line.md.
In Python: help(cpattn)."""


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog=_DOCUMENTS,
)
@click.version_option(__version__)
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Context-parallel attention for LLM serving on CPU: the new tokens of a batch are shared out
    to ranks, each of which attends from its own to the keys and values of all.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


CommandGroup.examples["explain"] = "cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4"
CommandGroup.examples["doctor"] = "cpattn doctor"


@commands.command(short_help="Draw which rank computes which tokens.")
@click.option("--lens", type=IntegerList(), required=True, help="New tokens of each sequence.")
@click.option("--prefix", type=IntegerList(), help="Cached tokens of each sequence [default: 0].")
@option("--cp-size", 2, "Number of ranks.", Integer(1, MAX_RANKS))
@option("--strategy", "zigzag", "How sequences are cut.", click.Choice(STRATEGIES))
def explain(lens: list[int], prefix: list[int] | None, cp_size: int, strategy: str) -> None:
    """Print the block map of a plan: which rank computes which tokens, and what they see.

    \b
    Two sequences, the second behind 64 cached tokens, over four ranks:
      cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4
    """
    from ..context_parallel.explain import MIN_WIDTH, block_map

    prefix = [0] * len(lens) if prefix is None else prefix
    width = max(streams.width() or streams.DEFAULT_WIDTH, MIN_WIDTH)
    with refusals_by_option(extend_lens="--lens", seq_lens="--prefix"):
        check_batch("--lens", lens, "--prefix", prefix)
        seq_lens = [cached + new for cached, new in zip(prefix, lens, strict=True)]
        text = block_map(lens, seq_lens, cp_size=cp_size, strategy=strategy, width=width)
    click.echo(text)


@commands.command(short_help="Say what this machine and environment will do.")
@click.option("--json", "as_json", is_flag=True, help="For machines: JSON on standard output.")
def doctor(as_json: bool) -> None:
    """Say what this machine and environment will do with cpattn.

    Instruction set, threads, memory, torch and its guard, engines and their releases, plug-ins,
    and what is missing for what, with the line that installs it; then attention on every
    instruction set of this machine against the oracle. Needs a second or two.

    Lines with ! are warnings, those with x are broken, those with - are worth to know. Exit code 1
    if something is broken: attention differs from the oracle, a variable cannot be used, or torch
    would die.

    \b
    What will happen here:
      cpattn doctor
    The same for a program:
      cpattn doctor --json
    What the portable kernels would do:
      CPATTN_ISA=portable cpattn doctor
    """
    from .doctor import report

    found = list(report.findings())
    if as_json:
        click.echo(report.as_json(found))
    else:
        width = streams.width() or streams.DEFAULT_WIDTH
        colours = streams.is_terminal() and not os.environ.get("NO_COLOR")
        click.echo(report.as_text(found, width, colours=colours))
    if not report.is_well(found):
        click.get_current_context().exit(1)
