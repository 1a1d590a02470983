# SPDX-License-Identifier: Apache-2.0
"""Overhead of a call: operators of torch, functions, and the core that they call.

    python bench/bench_torch_ops.py [--quick]

Inputs are so small that the overhead dominates. The core is given the outputs and all defaults; if
the function makes its output, so does its counterpart. Prints figures and keeps none.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import cpattn
from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)
import torch
from rich.table import Table

from bench.harness import command
from bench.harness.report import console
from bench.torch_ops.functions import OPERATOR_BAR, jobs, measure


def main() -> int:
    parser = command.parser(__doc__, quick="a few calls, bars not judged")
    rounds = 3 if parser.parse_args().quick else 300
    cpattn.set_num_threads(1)
    torch.set_num_threads(1)
    table = Table(title=f"µs a call, medians of {rounds} samples")
    for column in ("", "core", "function adds", "operator adds", "in inference mode", "missed"):
        table.add_column(column)
    missed = False
    gc.disable()
    for job in jobs():
        times = measure(job, rounds)
        bars = {"function": job.function_bar, "operator": OPERATOR_BAR, "inference": OPERATOR_BAR}
        behind = [f"{name} ≤ {bar:g}" for name, bar in bars.items() if times[name] > bar]
        cells = (f"{times[name]:.2f}" for name in ("core", "function", "operator", "inference"))
        table.add_row(f"{job.name}, tensors: {len(job.tensors)}", *cells, ", ".join(behind))
        missed |= bool(behind)
    console().print(table)
    return int(missed and rounds > 3)


if __name__ == "__main__":
    raise SystemExit(main())
