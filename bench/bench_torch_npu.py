# SPDX-License-Identifier: Apache-2.0
"""Overhead of a call under the names of torch_npu.

    python bench/bench_torch_npu.py [--quick]

Each operator against the function that it calls, or torch's own for rows of a cache, on inputs so
small that the overhead dominates; the last row is the write of a prefill. Prints figures, keeps
none.
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
from bench.torch_ops.npu import jobs, measure


def main() -> None:
    parser = command.parser(__doc__, quick="a few calls")
    rounds = 1 if parser.parse_args().quick else 30
    cpattn.set_num_threads(1)
    torch.set_num_threads(1)
    table = Table(title=f"µs a call, medians of {rounds} samples")
    for column in ("", "the function", "the operator adds", "in inference mode"):
        table.add_column(column)
    gc.disable()
    for name, function, operator in jobs():
        table.add_row(name, *(f"{x:.1f}" for x in measure(function, operator, rounds)))
    console().print(table)


if __name__ == "__main__":
    main()
