# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: indexer, top-k, sparse MLA, FP8 rows and metadata against torch and NumPy.

    python bench/bench_sparse.py [--quick] [--only TEXT]

Results are checked before anything is timed; implementations run in turns, in this process, on
the same threads and tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.harness import program
from bench.harness.figures import Row
from bench.sparse import memory, recall

PARTS = ("indexer", "topk", "mla", "rows", "metadata")

comparisons = partial(program.comparisons, "bench.sparse", PARTS)


def others(quick: bool, only: str) -> Iterator[list[Row]]:
    """The rows of a case that are not timed."""
    for module in (memory, recall):
        rows: list[Row] = []
        for row in module.rows(quick):
            if rows and row["case"] != rows[0]["case"]:
                yield rows
                rows = []
            if only in row["case"]["job"]:
                rows.append(row)
        if rows:
            yield rows


def main() -> int:
    arguments = program.parse_arguments(__doc__)
    chosen = arguments.quick, arguments.only
    return program.measure("sparse", arguments, comparisons(*chosen), others(*chosen))


if __name__ == "__main__":
    raise SystemExit(main())
