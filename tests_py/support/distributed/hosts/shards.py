# SPDX-License-Identifier: Apache-2.0
"""What the ranks of tests on several hosts run whose pools hold a share each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpattn.cost_model import AttentionLayer, exchange_work
from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import gather_kv, ring
from cpattn.distributed.transport import shared_memory
from cpattn.distributed.transport.exchange import TERMS
from cpattn.kv import MHATokenToKVPool, PageInterleave
from support.distributed import layer_worker as layers
from support.distributed import sharded_worker as sharded
from support.distributed.hosts.layouts import Layout, on_hosts
from support.distributed.shared_pool_worker import counting_sends
from support.distributed.write_attend_worker import Rank, layers_both_ways


def find_out(layout: Layout, rank: int) -> None:
    with on_hosts(layout, rank):
        topology = ContextParallel(dist.group.WORLD, page_size=1).topology()
    assert topology.transport == ("shm" if len(layout) == 1 else "shm+tcp")


def run_gathers(rank: int, layout: Layout) -> dict[str, Any]:
    """Whether "gather" has the bits over scratch of a host that it has without; and writes so."""
    alone = sharded.run_layers(rank, ["gather"])
    find_out(layout, rank)
    attend, calls = gather_kv._SharedGather.attend, []

    def counted(*arguments: Any) -> None:
        calls.append(1)
        attend(*arguments)

    with mock.patch.object(gather_kv._SharedGather, "attend", counted):
        at_once = sharded.run_layers(rank, ["gather"])
        with mock.patch.object(gather_kv, "head_rounds", _single_heads):
            in_rounds = sharded.run_layers(rank, ["gather"])
            written = dict(_both_ways("gather"))
    return {
        "different": [name for name, out in alone.items() if not _same(out, at_once[name])]
        + [name for name, out in alone.items() if not _same(out, in_rounds[name])],
        "not written alike": [name for name, same in written.items() if not same],
        "compared": len(alone) + len(written),
        "calls": len(calls),
    }


def run_rings(rank: int, layout: Layout) -> dict[str, Any]:
    """Layers of "ring" between hosts; whether they have the bits of a ring of rows of a mesh."""
    by_mesh = {}
    if len({len(ranks) for ranks in layout}) == 1:
        mesh = DeviceMesh("cpu", layout, mesh_dim_names=("ring", "heads"))
        by_mesh = sharded.run_layers(rank, ["usp"], mesh)
    find_out(layout, rank)
    by_host = sharded.run_layers(rank, ["ring"])
    with mock.patch.object(ring, "head_rounds", _single_heads):
        in_rounds = sharded.run_layers(rank, ["ring"])
        written = dict(_both_ways("ring"))
    return {
        "in rounds": [name for name, out in by_host.items() if not _same(out, in_rounds[name])],
        "by mesh": [
            name for name, out in by_mesh.items() if not _same(out, by_host["ring" + name[3:]])
        ],
        "not written alike": [name for name, same in written.items() if not same],
        "compared": len(by_host) + len(by_mesh) + len(written),
        "layers": by_host,
    }


def run_ring_bytes(rank: int, layout: Layout) -> dict[str, Any]:
    """What a ring between hosts sends to whom."""
    find_out(layout, rank)
    size, page, length = dist.get_world_size(), 4, 96
    placement = PageInterleave(shard_size=size, page_size=page)
    cp = ContextParallel(dist.group.WORLD, page_size=page, placement=placement, exchange="ring")
    plan = cp.plan([20], [length], block_tables=[range(length // page)])
    q = cp.shard(plan, torch.randn(20, 4, 32))
    shards = [torch.randn(length // size, 2, 32) for _ in "kv"]
    cp.attend(plan, q, *shards)  # which makes the scratch
    with counting_sends() as sends:
        cp.attend(plan, q, *shards)
    told = len(layout[0]) * 8 * len(TERMS)
    return {"rows": [send for send in sends if send[1] != told], "head bytes": 2 * 32 * 4}


def _single_heads(num_kv_heads: int, *_: int) -> list[slice]:
    return [slice(head, head + 1) for head in range(num_kv_heads)]


def _same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _both_ways(exchange: str) -> Iterable[tuple[str, bool]]:
    """Attention that writes new rows, beside `write_kv` before it."""
    for name, make in sharded.PLACEMENTS.items():
        options = {"placement": make(dist.get_world_size(), layers.PAGE), "exchange": exchange}
        for case, layer in layers.LAYERS.items():
            one = Rank(layer.plan, **options)
            yield f"{name}, {case}", one.both_ways(*layers.dense_inputs(), **layer.attend)
        others = layers_both_ways(Rank({}, **options), scales_of_tokens=False)
        yield from ((f"{name}, {case}", same) for case, same in others.items())


def run_padding(rank: int, layout: Layout) -> bool:
    """Padding tokens that are written though nobody sees them: bits are those of one call each."""
    find_out(layout, rank)
    size = dist.get_world_size()
    placement = PageInterleave(shard_size=size, page_size=4)
    cp = ContextParallel(dist.group.WORLD, page_size=4, placement=placement, exchange="gather")
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
    return _same([out, *pools[1]], [expected, *pools[0]])


def run_bytes(rank: int, layout: Layout) -> dict[str, int]:
    """What one layer sends to other hosts, and to its own."""
    find_out(layout, rank)
    size, page, extend, length = dist.get_world_size(), 4, 21, 90
    placement = PageInterleave(shard_size=size, page_size=page)
    cp = ContextParallel(dist.group.WORLD, page_size=page, placement=placement, exchange="gather")
    plan = cp.plan([extend], [length], block_tables=[range(-(-length // page))])
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        cp.shard(plan, torch.randn(extend, heads, 32, generator=draw)) for heads in (4, 2, 2)
    )
    shards = [torch.randn((length // page // size + 1) * page, 2, 32) for _ in "kv"]
    cp.attend(plan, q, *shards, k_local=k, v_local=v)  # which makes the scratch
    sent, received = cp.sent_bytes, cp.received_bytes
    with counting_sends() as sends:
        cp.attend(plan, q, *shards, k_local=k, v_local=v)
    predicted = exchange_work(
        [extend], [length], cp_size=size, placement="page_interleave", exchange="gather",
        layer=AttentionLayer(
            num_heads=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=page
        ),
        ranks_per_host=len(layout[0]),
    )  # fmt: skip
    (members,) = (ranks for ranks in layout if rank in ranks)
    told = (len(layout) - 1) * len(members) * 8 * len(TERMS)
    return {
        "sent": cp.sent_bytes - sent - told,
        "predicted sent": int(predicted.sent_bytes[rank]),
        "received": cp.received_bytes - received - told,
        "predicted received": int(predicted.received_bytes[rank]),
        "sent at home": sum(n for peer, n in sends if peer in members),
    }


def run_without_memory(rank: int, layout: Layout) -> str:
    """What all are told where the last host has no memory for scratch."""
    find_out(layout, rank)
    one = Rank({}, placement=sharded.PLACEMENTS["pages"](4, layers.PAGE), exchange="gather")
    with mock.patch.object(shared_memory, "available_bytes", return_value=(4 - rank) // 3 << 40):
        try:
            one.both_ways(*layers.dense_inputs())
        except MemoryError as error:
            return str(error)
    return "no error"


def run_nothing(rank: int, layout: Layout) -> int:
    """The rows that come out of a batch without a token, over a pool of each host."""
    find_out(layout, rank)
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    pool = MHATokenToKVPool(
        size=4, page_size=4, num_layers=1, num_kv_heads=2, head_dim=16, dtype="float32",
        memory=cp.shared_memory(),
    )  # fmt: skip
    empty = torch.zeros(0, 2, 16)
    plan = cp.plan([0, 0], block_tables=torch.zeros(2, 0, dtype=torch.int64))
    cp.write_kv(plan, empty, empty, *pool.get_kv_buffer(0))
    out = cp.attend(plan, empty, *pool.get_kv_buffer(0), k_local=empty, v_local=empty)
    assert not any(cache.any() for cache in pool.get_kv_buffer(0))
    dist.barrier()
    return len(out)
