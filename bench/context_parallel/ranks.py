# SPDX-License-Identifier: Apache-2.0
"""Times of ranks in separate processes, one thread each and pinned to a CPU."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

import cpattn
from cpattn_lab.cost_model import AttentionLayer

STRATEGIES = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Measured:
    """One rank in one case; seconds are medians."""

    attend_cpu: float
    attend: float
    write_kv: float
    sent_bytes: int


def run_rank(
    rank: int, size: int, store: str, layer: AttentionLayer, batches: dict[str, Any], repeats: int
) -> dict[tuple[str, str], Measured]:
    """All cases on one rank, in its own process."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cpattn.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    answer = {
        (name, strategy): measure(layer, batch, strategy, repeats)
        for name, batch in batches.items()
        for strategy in STRATEGIES
    }
    dist.barrier()
    dist.destroy_process_group()
    return answer


def measure(layer: AttentionLayer, batch: Any, strategy: str, repeats: int) -> Measured:
    import torch
    import torch.distributed as dist

    from cpattn.distributed import ContextParallel
    from cpattn.distributed.transport.terms import TERMS

    assert dist.group.WORLD is not None
    cp = ContextParallel(dist.group.WORLD, strategy=strategy, page_size=layer.page_size)
    extends, prefixes = map(np.array, batch)
    pages = -(-(extends + prefixes) // layer.page_size)
    tables = np.full((len(pages), pages.max()), -1, np.int32)
    tables[np.arange(pages.max()) < pages[:, None]] = np.arange(pages.sum())
    plan = cp.plan(extends, extends + prefixes, block_tables=tables)
    dtype = getattr(torch, layer.dtype)
    kv_shape = (layer.page_size, layer.num_kv_heads, layer.head_dim)
    k_cache, v_cache = (torch.randn(int(pages.sum()), *kv_shape).to(dtype) for _ in "kv")
    k, v = (torch.randn(plan.num_local_rows, *kv_shape[1:]).to(dtype) for _ in "kv")
    q = torch.randn(plan.num_local_rows, layer.num_heads, layer.head_dim).to(dtype)
    cp.write_kv(plan, k, v, k_cache, v_cache)  # ranks also compare versions, once for a group
    sent = -cp.sent_bytes
    cp.write_kv(plan, k, v, k_cache, v_cache)
    sent += cp.sent_bytes
    cp.attend(plan, q, k_cache, v_cache)
    times = []
    for _ in range(repeats):  # layer after layer
        dist.barrier()
        begin = time.perf_counter()
        cp.write_kv(plan, k, v, k_cache, v_cache)
        written, cpu = time.perf_counter(), time.thread_time()
        cp.attend(plan, q, k_cache, v_cache)
        times.append((time.thread_time() - cpu, time.perf_counter() - written, written - begin))
    attend_cpu, attend, write_kv = map(median, zip(*times, strict=True))
    agreement = 8 * len(TERMS)  # to each peer, before the rows
    return Measured(attend_cpu, attend, write_kv, sent - (cp.cp_size - 1) * agreement)


def run_world(size: int, *arguments: Any) -> list[dict[tuple[str, str], Measured]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, get_context("spawn")) as pool,
    ):
        store = f"file://{folder}/store"
        ranks = [pool.submit(run_rank, rank, size, store, *arguments) for rank in range(size)]
        return [rank.result() for rank in ranks]
