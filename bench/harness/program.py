# SPDX-License-Identifier: Apache-2.0
"""The program of a benchmark of comparisons, whose parts are modules of a package."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

import cpattn
from bench.harness import command, report, runner
from bench.harness.comparison import Comparison
from bench.harness.environment import environment, results_file
from bench.harness.figures import Row, case_label


def parse_arguments(
    description: str | None, budget: float = 0.8, parts: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse the command line; with `parts`, also the parts to measure."""
    parser = command.parser(description, quick="small cases, results not kept")
    parser.add_argument("--only", default="", help="cases with this text, not kept")
    parser.add_argument("--budget", type=float, default=budget, help="seconds of samples per peer")
    if parts:
        what = "what to measure; results of other parts are kept from earlier runs"
        parser.add_argument("--parts", nargs="+", default=parts, choices=parts, help=what)
    return parser.parse_args()


def comparisons(package: str, parts: Sequence[str], quick: bool, only: str) -> Iterator[Comparison]:
    for part in parts:
        for comparison in importlib.import_module(f"{package}.{part}").comparisons(quick):
            if only in case_label(comparison.case):
                yield comparison


def run(comparison: Comparison, budget: float) -> list[Row]:
    threads = comparison.threads
    cpattn.set_num_threads(threads)
    torch.set_num_threads(threads)
    common = {"part": comparison.part, "case": comparison.case}
    return [common | row for row in runner.run(comparison, budget)]


def measure(
    bench: str,
    arguments: argparse.Namespace,
    compared: Iterable[Comparison],
    others: Iterable[list[Row]] = (),
    excused: Sequence[str] = (),
    whole: bool = True,
) -> int:
    """Run, print and keep all cases; 1 if a bar is missed, or a row is neither ok nor excused.

    `others` are the rows of cases that are not timed here. Small cases have no bars. Unless the run
    is of the `whole` benchmark, rows of missing parts are kept from earlier runs.
    """
    begin, rows = time.monotonic(), []
    about = {"bench": bench} | environment()
    path = results_file(bench, about)
    unfinished = path.with_suffix(".jsonl.part")  # a run that is stopped leaves its rows there
    is_kept = not arguments.quick and not arguments.only
    if is_kept:
        unfinished.write_text("")
    budget = 0.01 if arguments.quick else arguments.budget
    for case in chain((run(comparison, budget) for comparison in compared), others):
        if arguments.quick:
            for row in case:
                row.pop("bars", None)
        report.print_case(case, f"{time.monotonic() - begin:.0f} s")
        rows += [row | about for row in case]
        if is_kept:
            unfinished.write_text(_lines(rows))
    if is_kept:
        parts = {row["part"] for row in rows}
        earlier: Iterable[Row] = (
            [] if whole or not path.exists() else map(json.loads, path.read_text().splitlines())
        )
        kept = [*(row for row in earlier if row["part"] not in parts), *rows]
        path.write_text(_lines(kept))
        unfinished.unlink()
    if not arguments.quick:
        report.print_bars(rows)
    missed = any(not bar["met"] for row in rows for bar in row.get("bars", ()))
    return int(missed or any(row["status"] not in ("ok", *excused) for row in rows))


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
