# SPDX-License-Identifier: Apache-2.0
"""Requests of a trace to the server of examples/, all at once: on one rank, and on two.

Weights are float32, in which all engines answer with the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from rich.table import Table

from bench.harness import accuracy
from bench.harness.contender import Failed
from bench.harness.figures import Row, duration
from bench.harness.report import console
from bench.models.peers import CORES, Peer
from bench.serving import served
from bench.serving.load import Load
from bench.serving.report import ninetieth

DTYPE = "float32"


def serve(peers: Iterable[Peer], work: Load, folder: Path, about: argparse.Namespace) -> list[Row]:
    """The rows of engines that served the requests in turn, engines on two ranks first.

    Each engine is stopped before the next one starts.
    """
    path = folder / "load.json"
    work.write(path)
    rows: list[Row] = []
    expected: list[list[int]] = []
    for peer in peers:
        try:
            answer = peer.ask("serve", load=str(path))
        finally:
            peer.stop()
        tokens = answer["tokens"]
        expected = expected or tokens
        rows.append(row_of(peer.name, work, answer, shares(expected, tokens), about))
    print_rows(work, rows)
    return rows[::-1]


def shares(expected: Sequence[list[int]], tokens: Sequence[list[int]]) -> tuple[float, float]:
    """The numbers of different answers and first tokens. Failed if they are beyond roundings."""
    pairs = list(zip(expected, tokens, strict=True))
    others = sum(a != b for a, b in pairs) / len(pairs)
    first = sum(a[0] != b[0] for a, b in pairs) / len(pairs)
    if first > accuracy.FIRST_TOKENS:
        raise Failed("wrong", f"{first:.0%} of the first tokens are others")
    return others, first


def row_of(
    name: str, work: Load, answer: Row, differing: tuple[float, float], about: argparse.Namespace
) -> Row:
    wall, first = answer["wall"], answer["first"]
    return {
        "part": "trace",
        "case": {"workload": "trace, all requests at once", "threads": CORES},
        "implementation": name,
        "status": "ok",
        "dtype": DTYPE,
        "median": wall,
        "minimum": wall,
        "spread": 0.0,
        "samples": 1,
        "dropped": 0,
        "error": differing[1],
        "ns_per_item": 1e9 * wall / work.prompt_tokens,
        "item": "prompt token",
        "first_token_median": median(first),
        "first_token_90_percent": ninetieth(first),
        "prompt_tokens_per_second": work.prompt_tokens / wall,
        "output_tokens_per_second": sum(work.output_lengths) / wall,
        "hit_share": answer["hit_tokens"] / work.prompt_tokens,
        "same_answers": round((1 - differing[0]) * len(first)),
    } | served.about(about, work)


def print_rows(work: Load, rows: Sequence[Row]) -> None:
    of = f"{len(work.prompts)} requests, {work.prompt_tokens} tokens of prompts"
    table = Table(title=f"{of}, {sum(work.output_lengths)} of answers", title_justify="left")
    for name in (
        "", "prompt tokens/s", "answer tokens/s", "first token: median", "90 % within", "hits",
        "same answers",
    ):  # fmt: skip
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["implementation"],
            f"{row['prompt_tokens_per_second']:.0f}",
            f"{row['output_tokens_per_second']:.1f}",
            duration(row["first_token_median"]),
            duration(row["first_token_90_percent"]),
            f"{row['hit_share']:.0%}",
            f"{row['same_answers']} of {row['requests']}",
        )
    console().print(table)
