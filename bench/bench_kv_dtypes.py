# SPDX-License-Identifier: Apache-2.0
"""8-bit KV caches: decode and prefill against cpattn's bfloat16, vLLM's FP8 and OpenVINO's u8.

    python bench/bench_kv_dtypes.py [--quick] [--only TEXT] [--budget SECONDS]

cpattn in bfloat16 takes its turns beside the 8-bit caches, on other tensors of the same lengths.
vLLM has FP8 with one scale; OpenVINO its u8 with its own scales for each of our formats. The peers
run in the environment of ``make bench-env``. Results are checked before they are timed.
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

from bench.attention import kv_dtypes
from bench.attention.turns import peer_contenders
from bench.harness import program
from bench.harness.figures import Row, case_label
from cpattn import _core


def cases(quick: bool, only: str, budget: float) -> Iterator[list[Row]]:
    threads = _core.default_num_threads()
    modules = ["ours", "ours:bfloat16", *kv_dtypes.PEERS * (not quick)]
    contenders = peer_contenders(modules, threads, quick)
    try:
        for case in kv_dtypes.cases(quick):
            if only in case_label(case.name):
                yield kv_dtypes.run(case, contenders, threads, budget)
    finally:
        for contender in contenders.values():
            contender.stop()


def main() -> int:
    arguments = program.parse_arguments(__doc__, budget=1.0)
    budget = 0.01 if arguments.quick else arguments.budget
    rows = cases(arguments.quick, arguments.only, budget)
    return program.measure("kv_dtypes", arguments, (), rows, ("unsupported",))


if __name__ == "__main__":
    raise SystemExit(main())
