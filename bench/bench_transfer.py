# SPDX-License-Identifier: Apache-2.0
"""KV transfer: planning against NumPy, writes into pools against torch, bytes over a real engine.

    python bench/bench_transfer.py [--quick] [--only TEXT]

Results are checked before anything is timed; implementations run in turns, in this process, on
the same threads and tensors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import cpattn
from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)
import torch

import comparison_report
import turns
from comparison import Comparison
from figures import Row
from harness import RESULTS, environment

PARTS = ("planning", "scatter", "local", "engine")
ABSENT = "not installed"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cases, results not kept")
    parser.add_argument("--only", default="", help="cases with this text in their jobs, not kept")
    parser.add_argument("--budget", type=float, default=0.8, help="seconds of samples per peer")
    return parser.parse_args()


def comparisons(quick: bool, only: str) -> Iterator[Comparison]:
    for part in PARTS:
        for comparison in importlib.import_module(f"transfer.{part}").comparisons(quick):
            if only in comparison.case["job"]:
                yield replace(comparison, bars=()) if quick else comparison


def run(comparison: Comparison, budget: float) -> list[Row]:
    threads = comparison.case["threads"]
    cpattn.set_num_threads(threads)
    torch.set_num_threads(threads)
    common = {"part": comparison.part, "case": comparison.case}
    return [common | row for row in turns.run(comparison, budget)]


def main() -> int:
    arguments = parse_arguments()
    quick, only = arguments.quick, arguments.only
    begin, rows = time.monotonic(), []
    about = {"bench": "transfer"} | environment()
    for comparison in comparisons(quick, only):
        case = run(comparison, 0.01 if quick else arguments.budget)
        comparison_report.print_case(case, f"{time.monotonic() - begin:.0f} s")
        rows += [row | about for row in case]
    if not quick and not only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "transfer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not quick:
        comparison_report.print_bars(rows)
    missed = any(not bar["met"] for row in rows for bar in row.get("bars", ()))
    return int(missed or any(row["status"] not in ("ok", ABSENT) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
