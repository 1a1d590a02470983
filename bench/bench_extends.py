# SPDX-License-Identifier: Apache-2.0
"""Few new tokens behind many cached ones, as a share of the roofline, against engines that page.

    python bench/bench_extends.py [--quick] [--only TEXT] [--budget SECONDS]

The roofline is the smaller of the peak of products and the bandwidth of reading times the flop for
each byte, both measured beside the samples. Each cache is queried by 1 to 256 new tokens of each
sequence, in turns by cpattn and the peers in the environment of ``make bench-env``. Cases whose
cache is too large for four copies are rows that say so. ``--only "batch 16, KV heads 8"`` takes
caches with this text in their names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.attention import extends
from bench.attention.turns import peer_contenders
from bench.harness import program
from bench.harness.figures import Row, case_label
from cpattn import _core

INVARIANT = "batch_invariant"


def cases(quick: bool, only: str, budget: float) -> Iterator[list[Row]]:
    threads = _core.default_num_threads()
    contenders = peer_contenders(["ours", *extends.PEERS * (not quick)], threads, quick)
    try:
        for group in extends.groups(quick):
            if only in case_label(group.case):
                yield from extends.run(group, contenders, threads, budget)
        if only in INVARIANT:
            yield extends.invariant(contenders, threads, budget, quick)
    finally:
        for contender in contenders.values():
            contender.stop()


def main() -> int:
    arguments = program.parse_arguments(__doc__, budget=0.1)
    budget = 0.01 if arguments.quick else arguments.budget
    rows = cases(arguments.quick, arguments.only, budget)
    return program.measure("extends", arguments, (), rows, ("unsupported", "too large", "too slow"))


if __name__ == "__main__":
    raise SystemExit(main())
