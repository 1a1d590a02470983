# SPDX-License-Identifier: Apache-2.0
"""Tables of bench_models.py: a model in one process and over two ranks, and a trace through it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from figure_tables import table

from bench.harness.figures import Row, duration


def of_part(rows: list[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part and "median" in row]


def models(rows: list[Row]) -> Iterator[str]:
    steps, served = of_part(rows, "steps"), of_part(rows, "trace")
    cases = [[*group][::-1] for _, group in groupby(steps, key=lambda row: row["case"])]
    yield f"Weights, keys and values are {steps[0]['dtype']}."
    yield "## Prompts and decode steps"
    for of in cases:
        yield f"### {of[0]['case']['workload'][0].upper()}{of[0]['case']['workload'][1:]}"
        yield table([COLUMNS, *map(cells, of)], 5)
    yield "### Memory"
    longest = cases[0]
    lines = [[row["implementation"], megabytes(row)] for row in longest if row["kept_bytes"]]
    after = f"keys and values after a {longest[0]['case']['workload']}, of each rank"
    yield table([["", after], *lines], 1)
    if served:
        yield from trace(served[::-1])


COLUMNS = ["", "time", "spread", "per token", "predicted", "efficiency"]


def cells(row: Row) -> list[str]:
    predicted = ""
    if "predicted" in row:
        off = row["predicted"] / row["median"] - 1
        predicted = f"{duration(row['predicted'])} ({off:+.0%})"
    return [
        row["implementation"],
        duration(row["median"]),
        f"{duration(row['spread'])}" if row["samples"] > 1 else "one sample",
        duration(1e-9 * row["ns_per_item"]),
        predicted,
        f"{row['efficiency']:.0%}" if "efficiency" in row else "",
    ]


def megabytes(row: Row) -> str:
    return ", ".join(f"{kept / 2**20:,.0f} MiB" for kept in row["kept_bytes"])


def trace(rows: list[Row]) -> Iterator[str]:
    first = rows[0]
    yield "## A trace"
    yield (
        f"{first['requests']} requests of {first['trace']}, lengths divided by "
        f"{first['lengths_divided_by']}, sent all at once by OpenAI's client to "
        f"`examples/serve_over_ranks.py`; {first['dtype']}. Random: {first['random']}. "
        "Beside the median time to a first token is that of nine requests in ten."
    )
    head = ["", "prompt tokens/s", "answer tokens/s", "first token", "90 % within"]
    lines = [
        [
            row["implementation"],
            f"{row['prompt_tokens_per_second']:,.0f}",
            f"{row['output_tokens_per_second']:.1f}",
            duration(row["first_token_median"]),
            duration(row["first_token_90_percent"]),
            f"{row['hit_share']:.0%}",
            f"{row['same_answers']} of {row['requests']}",
        ]
        for row in rows
    ]
    yield table([[*head, "prefix hits", "same answers"], *lines], 6)
