# SPDX-License-Identifier: Apache-2.0
"""The tables of bench_vllm.py, and the server's tables of bench_sglang_engine.py."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from rich.table import Table

from bench.harness.figures import Row, duration
from bench.harness.report import console
from bench.serving.load import Load
from bench.serving.turns import BACKENDS, Turn


def print_turns(title: str, work: Load, turns: Sequence[Sequence[Turn]]) -> None:
    """Medians of the turns, with the least and the most; first tokens are of all turns."""
    table = Table(title=title, title_justify="left")
    table.add_column("attention", no_wrap=True)
    columns = ("prompt tokens/s", "busy", "in attention", "first token: median", "90 % within")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    rates = [[work.prompt_tokens / turn.wall for turn in own] for own in turns]
    firsts = [[seconds for turn in own for seconds in turn.first] for own in turns]
    shown = [(median(first), ninetieth(first)) for first in firsts]
    for name, own, rate, first in zip(BACKENDS.values(), turns, rates, shown, strict=True):
        table.add_row(
            name,
            f"{median(rate):.0f} ({min(rate):.0f} – {max(rate):.0f})",
            f"{median(turn.busy / turn.wall for turn in own):.0%}",
            f"{median(turn.attention / turn.busy for turn in own):.1%}",
            *map(duration, first),
        )
    (stock_rate, our_rate), (stock_first, our_first) = map(median, rates), shown
    faster = (f"{a / b:.2f} ×" for a, b in zip(stock_first, our_first, strict=True))
    table.add_row("cpattn is faster by", f"{our_rate / stock_rate:.2f} ×", "", "", *faster)
    console().print(table)


def print_decode(title: str, names: Sequence[str], times: Sequence[tuple[float, float]]) -> None:
    """Each engine's seconds in attention of a layer and of a step; the first one has vLLM's own."""
    table = Table(title=title, title_justify="left")
    table.add_column("attention", no_wrap=True)
    for column in ("of a layer", "vLLM's own by it", "of a step"):
        table.add_column(column, justify="right", no_wrap=True)
    (stock, _), *_ = times
    for row, (name, (layer, step)) in enumerate(zip(names, times, strict=True)):
        ratio = f"{stock / layer:.2f} ×" if row else ""
        table.add_row(name, duration(layer), ratio, duration(step))
    console().print(table)


def ninetieth(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1]


def print_served(title: str, work: Load, rows: Sequence[Row]) -> None:
    """Print a load that servers of sglang took in turns, from the kept rows."""
    about = (
        f"{title}: {len(work.prompts)} requests of the trace {rows[0]['trace']}, lengths divided "
        f"by {rows[0]['lengths_divided_by']}: prompts of {work.prompt_tokens} tokens in all, "
        f"answers of {sum(work.output_lengths)}; random: {rows[0]['random']}"
    )
    table = Table(title=about, title_justify="left")
    table.add_column("attention", no_wrap=True)
    for column in ("prompt tokens/s", "answer tokens/s", "first token: median", "90 % within"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["implementation"],
            f"{row['prompt_tokens_per_second']:.0f}",
            f"{row['output_tokens_per_second']:.1f}",
            duration(row["first_token_median"]),
            duration(row["first_token_90_percent"]),
        )
    console().print(table)
