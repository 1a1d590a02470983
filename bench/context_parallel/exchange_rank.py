# SPDX-License-Identifier: Apache-2.0
"""One rank of bench_exchanges.py, a process on its host.

    python -m bench.context_parallel.exchange_rank RANK SIZE STORE HOST SETTINGS

HOST is a path of `cpattn_lab.processes.hosts.Hosts`, SETTINGS is `exchanges.Settings` as JSON; the
answer is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import cpattn
from bench.context_parallel.exchanges import AHEAD, PROBE_BYTES, WAYS, Settings, Shape, Way
from bench.harness import accuracy
from cpattn.distributed import ContextParallel
from cpattn.kv import PageInterleave
from cpattn_lab.processes.hosts import INTERFACE, enter

PAGE = 128
AHEAD_LAYERS = 4
#: Seconds of a shape in which no further round begins: calls that long differ little.
ENOUGH = 60


class Layer:
    """A rank's part of one request: pools with its prefix, and new rows."""

    def __init__(self, shape: Shape, settings: Settings) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        assert dist.group.WORLD is not None
        tokens = shape.cached + shape.new
        num_pages = -(-tokens // PAGE)
        random = torch.Generator().manual_seed(1)
        placement = PageInterleave(shard_size=size, page_size=PAGE)
        self.shape = shape
        kv = (num_pages * PAGE, settings.num_kv_heads, settings.head_dim)
        pools = [torch.randn(kv, generator=random).bfloat16() for _ in "kv"]
        self.whole = [pool.clone() for pool in pools]
        slots = torch.arange(len(pools[0])).numpy()
        mine = torch.from_numpy(placement.owner_of(slots) == rank)
        self.shards = [pool[mine].contiguous() for pool in pools]
        new = [pool[shape.cached : tokens] for pool in pools]
        q = torch.randn(shape.new, settings.num_heads, settings.head_dim, generator=random)
        tables = [list(range(num_pages))]
        lengths = [shape.new], [tokens]
        self.replicated = ContextParallel(dist.group.WORLD, page_size=PAGE, transport="tcp")
        self.plan = self.replicated.plan(*lengths, block_tables=tables)
        self.q, self.k, self.v = (self.replicated.shard(self.plan, x) for x in (q.bfloat16(), *new))
        self.sharded, self.sharded_plans = {}, {}
        for name in sorted({way.exchange for way in WAYS if way.sharded}):
            cp = ContextParallel(
                dist.group.WORLD, page_size=PAGE, placement=placement, exchange=name,
                max_scratch_bytes=1 << 30, transport="tcp",
            )  # fmt: skip
            self.sharded[name] = cp
            self.sharded_plans[name] = cp.plan(*lengths, block_tables=tables)

    def run(self, way: Way) -> torch.Tensor:
        if way.sharded:
            cp, plan = self.sharded[way.exchange], self.sharded_plans[way.exchange]
            pools = self.shards
        else:
            cp, plan, pools = self.replicated, self.plan, self.whole
        if way.overlapped:
            return cp.attend(plan, self.q, *pools, k_local=self.k, v_local=self.v)
        cp.write_kv(plan, self.k, self.v, *pools)
        return cp.attend(plan, self.q, *pools)

    def run_ahead(self) -> torch.Tensor:
        """Layers whose cached keys are gathered during the previous layer."""
        cp, plan = self.sharded["gather"], self.sharded_plans["gather"]
        prefixes = cp.prefetch(plan, [tuple(self.shards)] * AHEAD_LAYERS)
        for _ in range(AHEAD_LAYERS):
            out: torch.Tensor = cp.attend(
                plan, self.q, *self.shards, k_local=self.k, v_local=self.v, prefetched=prefixes
            )
        return out

    def compute(self) -> torch.Tensor:
        """Attention alone, on pools with all keys."""
        return self.replicated.attend(self.plan, self.q, *self.whole)


def choice_of(layer: Layer, settings: Settings) -> str:
    """The exchange that `ContextParallel` takes by itself."""
    cp, plan = next((layer.sharded[name], plan) for name, plan in layer.sharded_plans.items())
    return cp.choose_exchange(
        plan, num_heads=settings.num_heads, num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim, writes=True,
    ).exchange  # fmt: skip


def check_rows(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuse rows that differ by more than the roundings of each side."""
    apart = (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    bound = 2 * accuracy.attention("bfloat16", "cpattn", None)
    if not (len(out) == len(expected) and float(apart.max()) <= bound):
        raise AssertionError(f"rows are up to {float(apart.max()):.2g} of their norm apart")


def timed(call: Callable[[], Any]) -> float:
    """Seconds from when all ranks begin to when the last one is done."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    mine = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def probe_link() -> None:
    """Send PROBE_BYTES from each rank to its counterpart on the other host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = (rank + size // 2) % size
    sent, received = torch.zeros(2, PROBE_BYTES, dtype=torch.uint8)
    works = [dist.irecv(received, peer), dist.isend(sent, peer)]
    for work in works:
        assert work is not None  # both ranks are of the group
        work.wait()


def peers_of(shape: Shape, settings: Settings, layer: Layer) -> dict[str, Callable[[], Any]]:
    """ring-flash-attn on these kernels, if installed and capable: prompts without a prefix.

    Rows are this rank's by ring-flash-attn's own division of the same tokens.
    """
    if shape.cached or not settings.ring_flash_attn:
        return {}
    from bench.context_parallel.ring_flash_attn import methods

    return methods(settings.ring_flash_attn, layer, shape, check_rows)


def measure(settings: Settings) -> dict[str, Any]:
    answer: dict[str, Any] = {"shapes": {}, "auto": {}}
    timed(probe_link)
    answer["link"] = min(timed(probe_link) for _ in range(3))
    for shape in settings.shapes:
        layer = Layer(shape, settings)
        calls: dict[str, Callable[[], Any]] = {way.name: partial(layer.run, way) for way in WAYS}
        calls |= peers_of(shape, settings, layer)
        expected = layer.run(WAYS[0])
        if shape.cached:
            calls[AHEAD.name] = layer.run_ahead
            check_rows(layer.run_ahead(), expected)
        for way in WAYS[1:]:  # before anything is timed
            check_rows(layer.run(way), expected)
        calls["compute"] = layer.compute
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(settings.rounds):
            for name, call in calls.items():
                layers = AHEAD_LAYERS if name == AHEAD.name else 1
                times[name].append(timed(call) / layers)
            if sum(map(sum, times.values())) > ENOUGH:  # the same on all ranks
                break
        answer["shapes"][shape.name] = times
        answer["auto"][shape.name] = choice_of(layer, settings)
    return answer


def main() -> None:
    rank, size = map(int, sys.argv[1:3])
    enter(sys.argv[4])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    settings = Settings.from_json(sys.argv[5])
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    torch.set_num_threads(1)
    cpattn.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=sys.argv[3], rank=rank, world_size=size,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    answer = measure(settings)
    if rank == 0:
        print(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
