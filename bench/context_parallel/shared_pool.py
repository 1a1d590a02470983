# SPDX-License-Identifier: Apache-2.0
"""Measurements of ranks with separate KV pools and with a shared one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import cpattn

from . import vllm_gather

LAYER = 0
VLLM = "vllm"


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


@dataclass(frozen=True)
class Measured:
    """Times of one rank, by transport: seconds of every round, for agreements the median call.

    If vLLM is installed, `write_kv` also has the time of its all-gather of the same rows to all
    ranks: into a tensor of each rank, not into a pool.
    """

    write_kv: dict[str, list[float]]
    agreement: dict[str, float]
    attend: dict[str, list[float]]
    pool_bytes: dict[str, int]
    topology: str


def run_rank(rank: int, size: int, store: str, shape: Shape, rounds: int, calls: int) -> Measured:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cpattn.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    try:
        return _measure(shape, rounds, calls, Path(store).parent.name)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _measure(shape: Shape, rounds: int, calls: int, identity: str) -> Measured:
    import torch
    import torch.distributed as dist

    from cpattn.distributed import ContextParallel
    from cpattn.kv import MHATokenToKVPool

    assert dist.group.WORLD is not None
    ways = {
        transport: ContextParallel(dist.group.WORLD, page_size=shape.page_size, transport=transport)
        for transport in ("tcp", "shm")
    }
    num_pages = -(-shape.num_tokens // shape.page_size)
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)) + 1
    plans = {name: cp.plan([shape.num_tokens], block_tables=[table.tolist()])
             for name, cp in ways.items()}  # fmt: skip
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(shape.num_tokens, shape.num_kv_heads, shape.head_dim, generator=random)
    new = rows.bfloat16()
    k, v = ways["shm"].shard(plans["shm"], new), ways["shm"].shard(plans["shm"], -new)
    q = torch.randn(len(k), shape.num_heads, shape.head_dim).bfloat16()
    del rows

    pools, pool_bytes = {}, {}
    for name, cp in ways.items():
        pools[name] = MHATokenToKVPool(
            size=num_pages * shape.page_size,
            page_size=shape.page_size,
            num_layers=1,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            memory=cp.shared_memory() if name == "shm" else None,
        )
        cp.write_kv(plans[name], k, v, *pools[name].get_kv_buffer(LAYER))
        for cache in pools[name].get_kv_buffer(LAYER):  # mapped by every rank that reads it
            cache.sum()
        dist.barrier()
        pool_bytes[name] = _memory_of(pools[name])
        dist.barrier()
    slots = torch.tensor(plans["shm"].slots)
    for pool in pools.values():  # before anything is timed
        for cache, expected in zip(pool.get_kv_buffer(LAYER), (new, -new), strict=True):
            assert torch.equal(cache.flatten(0, 1)[slots], expected)

    vllm = vllm_gather.make_communicator(identity) if vllm_gather.is_there() else None
    if vllm is not None:
        assert torch.equal(ways["shm"].gather(plans["shm"], k), new)
        parts = [torch.empty_like(k) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, k)
        assert torch.equal(vllm.all_gather(k, 0), torch.cat(parts))

    def write(name: str) -> None:
        if vllm is not None and name == VLLM:
            vllm.all_gather(k, 0)
            vllm.all_gather(v, 0)
        else:
            ways[name].write_kv(plans[name], k, v, *pools[name].get_kv_buffer(LAYER))

    def attend(name: str) -> Any:
        return ways[name].attend(plans[name], q, *pools[name].get_kv_buffer(LAYER))

    def agree(name: str) -> None:
        with ways[name]._exchange.agreement("write_kv", plans[name].terms):
            pass

    assert torch.equal(attend("tcp"), attend("shm"))
    writers = list(ways) if vllm is None else [*ways, VLLM]
    written = _in_turns(write, writers, rounds, time.perf_counter)
    attended = _in_turns(attend, list(ways), rounds, time.thread_time)
    agreed = {}
    for name in ways:
        batches = []
        for _ in range(rounds):
            dist.barrier()
            agree(name)
            begin = time.perf_counter()
            for _ in range(calls):
                agree(name)
            batches.append((time.perf_counter() - begin) / calls)
        agreed[name] = median(batches)
    return Measured(written, agreed, attended, pool_bytes, repr(ways["shm"].topology()))


def _in_turns(
    call: Callable[[str], Any], names: list[str], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            dist.barrier()
            begin = clock()
            call(name)
            times[name].append(clock() - begin)
    return times


def _memory_of(pool: Any) -> int:
    """Memory of the buffers of a pool; for memory that others also map, this process's share."""
    addrs, sizes, _ = pool.get_contiguous_buf_infos()
    total, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):  # 7f0a1000-7f0b2000 rw-s ...
            begin, end = (int(part, 16) for part in first.split("-"))
            within = any(begin < a + n and a < end for a, n in zip(addrs, sizes, strict=True))
        elif within and first == "Pss:":
            total += 1024 * int(rest[0])
    return total


def run_world(size: int, *arguments: Any) -> list[Measured]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, get_context("spawn")) as pool,
    ):
        store = f"file://{folder}/store"
        ranks = [pool.submit(run_rank, rank, size, store, *arguments) for rank in range(size)]
        return [rank.result() for rank in ranks]
