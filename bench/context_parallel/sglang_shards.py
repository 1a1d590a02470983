# SPDX-License-Identifier: Apache-2.0
"""A chunk of prefill on pools that 8 ranks stripe: its pages, its gather, and its pages freed.

The two do the same to sglang's objects, tensors on the CPU, and ours is called through sglang's
hooks.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cpattn.integrations import sglang as plugin

sys.path.append(str(Path(__file__).parents[2] / "tests_py"))  # which makes sglang's objects
from support.sglang import sglang_planning, striped_pools

SIZES = {"shard_size": 8, "page_size": 64}
POOL_SIZE = 400_000 // 64 * 64  # slots of a rank
SCRATCH = {"max_prefix_tokens": 1 << 20, "chunk_tokens": 1 << 16}
PLANS = ("alloc_extend", "begin_shard_extend", "free")


class Batch(NamedTuple):
    num_requests: int
    num_cached: int
    num_new: int


BATCHES = (Batch(1, 4096, 1024), Batch(8, 8192, 1024), Batch(32, 4096, 256))


@cache
def engine() -> SimpleNamespace:
    return sglang_planning.load()


def measure(batch: Batch, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each plan by sglang and by cpattn, in turns, both with the same results."""
    allocator = striped_pools.make_allocator(engine(), POOL_SIZE, SIZES, need_sort=True)
    prefixes = [
        allocator.alloc_extend(
            *striped_pools.extend_arguments([0], [batch.num_cached]), rotation_bases=[None]
        )
        for _ in range(batch.num_requests)
    ]
    pool = striped_pools.make_pool(engine(), 0, SIZES, SCRATCH, POOL_SIZE)
    pool._debug_plan_checks = False
    samples: dict[str, dict[str, list[float]]] = {
        "sglang": defaultdict(list),
        "cpattn": defaultdict(list),
    }
    try:
        for _ in range(rounds):
            plans = {}
            for name, times in samples.items():
                plugin.install("shards")
                if name == "sglang":
                    plugin.uninstall()
                plans[name] = step(batch, allocator, pool, prefixes, times)
            if plans["sglang"] != plans["cpattn"]:
                raise AssertionError("the plans differ")
    finally:
        plugin.uninstall()
    return {
        name: {plan: 1e6 * median(times[plan]) for plan in PLANS} for name, times in samples.items()
    }


def step(
    batch: Batch,
    allocator: Any,
    pool: Any,
    prefixes: list[torch.Tensor],
    times: dict[str, list[float]],
) -> tuple[Any, ...]:
    """One chunk of all requests; its plan, as plain values."""

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - begin)
        return result

    cached, new = [batch.num_cached] * batch.num_requests, batch.num_new
    given = striped_pools.extend_arguments(cached, [batch.num_cached + new] * len(cached))
    page_size, num_ranks = SIZES["page_size"], SIZES["shard_size"]
    bases = [int(prefix[0]) // page_size % num_ranks for prefix in prefixes]
    slots = timed("alloc_extend", lambda: allocator.alloc_extend(*given, rotation_bases=bases))
    table = torch.cat((torch.stack(prefixes), slots.view(-1, new)), dim=1).to(torch.int32)
    rows = torch.arange(len(cached))
    timed("begin_shard_extend", lambda: pool.begin_shard_extend(table, rows, cached, given[3]))
    timed("free", lambda: allocator.free(slots))
    # Freed pages come in another order the next time, so only their number is compared.
    return pool._block_pages, pool._send_pages.tolist(), allocator.class_free_page_counts()
