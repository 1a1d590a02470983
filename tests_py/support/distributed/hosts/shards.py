# SPDX-License-Identifier: Apache-2.0
"""Layers with sharded pools, on ranks of hosts with shared scratch."""

import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import gather_kv, ring
from cpattn.distributed.transport import shared_memory
from cpattn.distributed.transport.terms import TERMS
from cpattn.kv import MHATokenToKVPool
from cpattn_lab.cost_model import AttentionLayer, exchange_work
from support.distributed.distributed_worker import error_of
from support.distributed.hosts.layouts import Layout, members_of, on_hosts
from support.distributed.layer_worker import LAYERS, LayerRun, Rank, run_layer
from support.distributed.sharded_worker import PLACEMENTS, Step, equal, run_ways, written_step
from support.distributed.shared_pool_worker import counting_sends

ROWS = list(zip(LAYERS, itertools.cycle(PLACEMENTS)))


def runs_of(exchange: str) -> list[LayerRun]:
    runs = [LayerRun(name, exchange, placement) for name, placement in ROWS]
    return [run for run in runs if run.is_possible]


def find_out(layout: Layout, rank: int) -> None:
    with on_hosts(layout, rank):
        topology = ContextParallel(dist.group.WORLD, page_size=1).topology()
    assert topology.transport == ("shm" if len(layout) == 1 else "shm+tcp")


def sharded(exchange: str) -> ContextParallel:
    placement = PLACEMENTS["pages"](dist.get_world_size(), 4)
    return ContextParallel(dist.group.WORLD, page_size=4, placement=placement, exchange=exchange)


def _single_heads(num_kv_heads: int, *_: int) -> list[slice]:
    return [slice(head, head + 1) for head in range(num_kv_heads)]


def _different(some: dict[LayerRun, Any], others: dict[LayerRun, Any]) -> list[str]:
    """Return runs whose results differ between these, or between their ways to compute."""
    return [
        str(run)
        for run, told in some.items()
        if not all(told["ways"].values())
        or not equal([told["out"], told["lse"]], [others[run]["out"], others[run]["lse"]])
    ]


def run_layers(rank: int, layout: Layout, exchange: str) -> dict[str, Any]:
    """Run layers over scratch of hosts; return them, and which differ with a round per head.

    "gather" must have the bits that it has without such scratch, and "ring" the bits of a mesh
    whose rows are hosts.
    """
    runs = runs_of(exchange)
    alone = {}
    if exchange == "gather":
        alone = {run: run_layer(run, ahead=False) for run in runs}
    elif len({len(ranks) for ranks in layout}) == 1:
        mesh = DeviceMesh("cpu", layout, mesh_dim_names=("ring", "heads"))
        by_mesh = [LayerRun(run.name, "usp", run.placement) for run in runs]
        alone = {run: run_layer(other, mesh) for run, other in zip(runs, by_mesh, strict=True)}
    find_out(layout, rank)
    attend, calls = gather_kv._SharedGather.attend, []

    def counted(*arguments: Any) -> None:
        calls.append(1)
        attend(*arguments)

    with mock.patch.object(gather_kv._SharedGather, "attend", counted):
        layers = {run: run_layer(run, ahead=False) for run in runs}
        module = gather_kv if exchange == "gather" else ring
        with mock.patch.object(module, "head_rounds", _single_heads):
            in_rounds = {run: run_layer(run, ahead=False) for run in runs}
    different = _different(in_rounds, layers) + (_different(layers, alone) if alone else [])
    return {"different": different, "layers": layers, "calls": len(calls)}


def run_padding(rank: int, layout: Layout) -> bool:
    """Write unseen padding tokens in one call; return whether bits equal those of two calls."""
    find_out(layout, rank)
    cp = sharded("gather")
    plan = cp.plan(
        [9], block_tables=[[2, 0, 1, 4]], num_tokens=13,
        out_cache_loc=[8, 9, 10, 11, 0, 1, 2, 3, 4, 16, 17, 18, 19],
    )  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    q, k, v = (cp.shard(plan, torch.randn(13, 2, 16, generator=draw)) for _ in "qkv")
    pools = [[torch.zeros(8, 2, 16) for _ in "kv"] for _ in "ab"]
    cp.write_kv(plan, k, v, *pools[0])
    expected = cp.attend(plan, q, *pools[0])
    out = cp.attend(plan, q, *pools[1], k_local=k, v_local=v)
    return equal([out, *pools[1]], [expected, *pools[0]])


def run_steps(rank: int, layout: Layout, steps: list[Step]) -> tuple[list[str], int]:
    """Return decode steps whose bits differ from those without shared memory, and bytes sent."""
    runs = [(step, "pages") for step in steps]
    alone = run_ways(rank, runs)
    find_out(layout, rank)
    different = [
        f"{run[0].name} {way}"
        for run, ways in run_ways(rank, runs).items()
        for way, state in ways.items()
        if not equal(state, alone[run][way])
    ]
    cp, plan, queries, shards = written_step(rank, steps[0], "pages")
    sent = cp.sent_bytes
    cp.decode(plan, **queries, k_shard=shards[0], v_shard=shards[1])
    return different, cp.sent_bytes - sent


def run_bytes(rank: int, layout: Layout) -> dict[str, int]:
    """Return bytes that a layer sends to other hosts and its own, and the messages of a ring."""
    find_out(layout, rank)
    size, page, extend, length = dist.get_world_size(), 4, 21, 90
    cp = sharded("gather")
    plan = cp.plan([extend], [length], block_tables=[range(-(-length // page))])
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        cp.shard(plan, torch.randn(extend, heads, 32, generator=draw)) for heads in (4, 2, 2)
    )
    shards = [torch.randn((length // page // size + 1) * page, 2, 32) for _ in "kv"]
    cp.attend(plan, q, *shards, k_local=k, v_local=v)  # this makes the scratch
    sent, received = cp.sent_bytes, cp.received_bytes
    with counting_sends() as sends:
        cp.attend(plan, q, *shards, k_local=k, v_local=v)
    layer = AttentionLayer(
        num_heads=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=page
    )
    predicted = exchange_work(
        [extend], [length], cp_size=size, placement="page_interleave", exchange="gather",
        layer=layer, ranks_per_host=len(layout[0]),
    )  # fmt: skip
    one = sharded("ring")
    plan = one.plan([20], [96], block_tables=[range(24)])
    shards = [torch.randn(96 // size, 2, 32) for _ in "kv"]
    sent, received = cp.sent_bytes - sent, cp.received_bytes - received
    for _ in range(2):  # the first call makes the scratch
        with counting_sends() as ring_sends:
            one.attend(plan, torch.randn(plan.num_local_rows, 4, 32), *shards)
    members = members_of(layout, rank)
    told = (len(layout) - 1) * len(members) * 8 * len(TERMS)
    return {
        "sent": sent - told,
        "predicted sent": int(predicted.sent_bytes[rank]),
        "received": received - told,
        "predicted received": int(predicted.received_bytes[rank]),
        "sent at home": sum(n for peer, n in sends if peer in members),
        "by ring": [send for send in ring_sends if send[1] != told],
    }


def run_edges(rank: int, layout: Layout) -> dict[str, Any]:
    """Run padding that is written, a batch without tokens, and a host without scratch memory."""
    padding = run_padding(rank, layout)
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    pool = MHATokenToKVPool(
        size=4, page_size=4, num_layers=1, num_kv_heads=2, head_dim=16, dtype="float32",
        memory=cp.shared_memory(),
    )  # fmt: skip
    empty, caches = torch.zeros(0, 2, 16), pool.get_kv_buffer(0)
    plan = cp.plan([0, 0], block_tables=torch.zeros(2, 0, dtype=torch.int64))
    cp.write_kv(plan, empty, empty, *caches)
    out = cp.attend(plan, empty, *caches, k_local=empty, v_local=empty)
    written = any(cache.any() for cache in caches)
    dist.barrier()
    one = Rank(LayerRun("plain", "gather", "pages"))
    nothing = rank in layout[-1]
    with mock.patch.object(
        shared_memory, "available_bytes", return_value=0 if nothing else 1 << 40
    ):
        told, _ = error_of(lambda: one.attend(one.layer))
    return {"padding": padding, "rows": len(out), "written": written, "told": told}
