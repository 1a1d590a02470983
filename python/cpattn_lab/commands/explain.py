# SPDX-License-Identifier: Apache-2.0
"""`cpattn explain`: the block map of a plan."""

from __future__ import annotations

import click

from cpattn_terminal import streams
from cpattn_terminal.command_group import CommandGroup, refusals_by_option
from cpattn_terminal.limits import MAX_RANKS, check_batch
from cpattn_terminal.options import Integer, IntegerList

from .declarations import STRATEGIES, option

CommandGroup.examples["explain"] = "cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4"


@click.command(short_help="Draw which rank computes which tokens.")
@click.option("--lens", type=IntegerList(), required=True, help="New tokens of each sequence.")
@click.option("--prefix", type=IntegerList(), help="Cached tokens of each sequence [default: 0].")
@option("--cp-size", 2, "Number of ranks.", Integer(1, MAX_RANKS))
@option("--strategy", "zigzag", "Way of cutting sequences.", click.Choice(STRATEGIES))
def explain(lens: list[int], prefix: list[int] | None, cp_size: int, strategy: str) -> None:
    """Print the block map of a plan: which rank computes which tokens, and what they see.

    \b
    Two sequences, the second behind 64 cached tokens, over four ranks:
      cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4
    """
    from ..explain import MIN_WIDTH, block_map

    prefix = [0] * len(lens) if prefix is None else prefix
    width = max(streams.width() or streams.DEFAULT_WIDTH, MIN_WIDTH)
    with refusals_by_option(extend_lens="--lens", seq_lens="--prefix"):
        check_batch("--lens", lens, "--prefix", prefix)
        seq_lens = [cached + new for cached, new in zip(prefix, lens, strict=True)]
        text = block_map(lens, seq_lens, cp_size=cp_size, strategy=strategy, width=width)
    click.echo(text)
