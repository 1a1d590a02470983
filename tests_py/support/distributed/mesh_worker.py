# SPDX-License-Identifier: Apache-2.0
"""Ranks in two dimensions: prefills and layers by USP, and what meshes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import ring
from cpattn.distributed.transport.exchange import TERMS
from support.distributed import sharded_faults
from support.distributed import sharded_worker as sharded
from support.distributed.prefill_batches import Case
from support.distributed.sharded_worker import PLACEMENTS, Run

LAYER_HEADS, LAYER_KV_HEADS, LAYER_DIM = 8, 2, 32
# By name: the ranks, and the names of the dimensions.
MESHES: dict[str, tuple[list[list[int]], tuple[str, str]]] = {
    "2 x 2": ([[0, 1], [2, 3]], ("ring", "heads")),
    "1 x 4": ([[0, 1, 2, 3]], ("ring", "heads")),
    "4 x 1": ([[0], [1], [2], [3]], ("ring", "heads")),
    "columns first": ([[3, 0], [1, 2]], ("heads", "ring")),
    "2 x 3": ([[0, 1, 2], [3, 4, 5]], ("ring", "heads")),
}


def make_mesh(name: str) -> DeviceMesh:
    ranks, dims = MESHES[name]
    return DeviceMesh("cpu", ranks, mesh_dim_names=dims)


def num_ranks(name: str) -> int:
    return sum(map(len, MESHES[name][0]))


def run_prefills(rank: int, name: str, runs: list[Run]) -> dict[str, dict[str, Any]]:
    """By USP, and by exchanges of one dimension on the same ranks."""
    mesh = make_mesh(name)
    return {str(run): sharded.run_prefill(run, mesh) for run in runs}


def run_layers(rank: int, name: str) -> dict[str, list[torch.Tensor]]:
    return sharded.run_layers(rank, ["usp"], make_mesh(name))


def run_part_of_the_world(rank: int, case: Case) -> tuple[Any, list[int], float] | str:
    """Ranks 0 and 2 of three are a mesh; rank 1 is told that it is not one of them."""
    mesh = DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("ring", "heads"))
    try:
        cp = ContextParallel(mesh, page_size=4)
    except ValueError as error:
        return str(error)
    again = ContextParallel(mesh, page_size=4)
    assert again.group is cp.group
    plan = cp.plan([5, 3], block_tables=[[1, 2], [0, -1]])
    x = torch.arange(8.0)
    assert torch.equal(cp.gather(plan, cp.shard(plan, x)), x)
    timeout = cp.group._get_backend(torch.device("cpu")).options._timeout
    return cp.mesh, dist.get_process_group_ranks(cp.group), timeout.total_seconds()


def run_other_meshes(rank: int, case: Case) -> dict[str, str]:
    """What all are told where the last rank has its mesh the other way round, and is lost."""
    meshes = [make_mesh("2 x 2"), make_mesh("columns first")]
    run = Run(replace(case, name="mesh"), "pages", "usp")
    told = {}
    try:
        sharded.run_prefill(run, meshes[rank == 3])
    except RuntimeError as error:
        told["other mesh"] = str(error)
    told["at last"] = str(sharded.run_prefill(run, meshes[0])["shards"])
    return told


def run_loss(rank: int) -> str:
    return sharded_faults.run_loss(rank, "usp", make_mesh("2 x 2"))


def run_received(rank: int, case: Case) -> tuple[int, dict[str, int], list[str]]:
    """Bytes that came in for attention by USP, those of the choice, and the order of events."""
    batch = sharded.make_batch(case)
    cp = ContextParallel(
        make_mesh("2 x 2"), page_size=case.page_size, exchange="usp",
        placement=PLACEMENTS["pages"](4, case.page_size),
    )  # fmt: skip
    plan = sharded.make_plan(cp, case, batch)
    shards = [
        sharded.shard_of(plan.placement, rank, pool, case.page_size).nan_to_num(0)
        for pool in (batch.k_cache, batch.v_cache)
    ]
    events: list[Any] = []
    post, finish = cp._exchange.post, cp._exchange.finish
    attend_part = ring.attend_part

    def posted(call: str, sends: Any, receives: Any) -> Any:
        if call == "attend":
            events.append(sum(x.numel() * x.element_size() for x in receives.values()))
        return post(call, sends, receives)

    def finished(work: Any) -> None:
        if work.call == "attend":
            events.append("finish")
        finish(work)

    def computed(*arguments: Any, **options: Any) -> Any:
        events.append("compute")
        return attend_part(*arguments, **options)

    cp._exchange.post, cp._exchange.finish = posted, finished
    with mock.patch.object(ring, "attend_part", computed):
        cp.attend(plan, cp.shard(plan, batch.q), *shards)
    choice = cp.choose_exchange(
        plan, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
        element_bytes=4,
    ).received_bytes  # fmt: skip
    names = ["post" if isinstance(event, int) else event for event in events]
    return sum(event for event in events if isinstance(event, int)), choice, names


def run_layer_bytes(rank: int, name: str, extend: int, prefix: int) -> tuple[int, int]:
    """What a rank sends and receives by USP for a layer of one request, without agreements."""
    mesh, page = make_mesh(name), 16
    size = num_ranks(name)
    cp = ContextParallel(
        mesh, page_size=page, exchange="usp", placement=PLACEMENTS["pages"](size, page)
    )
    pages = -(-(extend + prefix) // page)
    plan = cp.plan([extend], [extend + prefix], block_tables=[range(pages)])
    shards = torch.zeros(2, pages * page, LAYER_KV_HEADS, LAYER_DIM)
    q = torch.zeros(plan.num_local_rows, LAYER_HEADS, LAYER_DIM)
    k, v = torch.zeros(2, plan.num_local_rows, LAYER_KV_HEADS, LAYER_DIM)

    def layer() -> None:
        cp.write_kv(plan, k, v, *shards)
        cp.attend(plan, q, *shards)

    layer()  # ranks compare versions, once for a group
    before = cp.sent_bytes, cp.received_bytes
    layer()
    agreements = 2 * (size - 1) * 8 * len(TERMS)
    sent, received = (
        now - then - agreements
        for now, then in zip((cp.sent_bytes, cp.received_bytes), before, strict=True)
    )
    return sent, received
