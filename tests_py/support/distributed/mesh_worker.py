# SPDX-License-Identifier: Apache-2.0
"""Runs of USP on the ranks of two-dimensional meshes."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpattn.distributed import ContextParallel
from cpattn.distributed.transport.terms import TERMS
from cpattn_lab.cost_model import AttentionLayer
from support.distributed.disagreements import SMALL
from support.distributed.distributed_worker import error_of
from support.distributed.sharded_worker import PLACEMENTS, Run, run_prefill

LAYER = AttentionLayer(num_heads=8, num_kv_heads=2, head_dim=32, dtype="float32", page_size=16)
# Ranks, and names of the dimensions, by the name of the mesh.
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


def run_part_of_the_world(rank: int) -> tuple[Any, list[int], float] | str:
    """Run a layer on a mesh of ranks 0 and 2 of three; rank 1 returns its error instead."""
    mesh = DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("ring", "heads"))
    try:
        cp = ContextParallel(mesh, page_size=4)
    except ValueError as error:
        return str(error)
    assert ContextParallel(mesh, page_size=4).group is cp.group
    plan = cp.plan([5, 3], block_tables=[[1, 2], [0, -1]])
    x = torch.arange(8.0)
    assert torch.equal(cp.gather(plan, cp.shard(plan, x)), x)
    timeout = cp.group._get_backend(torch.device("cpu")).options._timeout
    return cp.mesh, dist.get_process_group_ranks(cp.group), timeout.total_seconds()


def run_other_mesh(rank: int) -> tuple[str, bool]:
    """Return errors of ranks if rank 3 has its mesh transposed, and whether they go on."""
    meshes = [make_mesh("2 x 2"), make_mesh("columns first")]
    run = Run(replace(SMALL, name="mesh"), "pages", "usp")
    told, _ = error_of(lambda: run_prefill(run, meshes[rank == 3]))
    return told, run_prefill(run, meshes[0])["pools"]


def run_layer_bytes(rank: int, name: str, extend: int, prefix: int) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives by USP for a layer, without agreements."""
    page, size = LAYER.page_size, num_ranks(name)
    cp = ContextParallel(
        make_mesh(name), page_size=page, exchange="usp", placement=PLACEMENTS["pages"](size, page)
    )
    pages = -(-(extend + prefix) // page)
    plan = cp.plan([extend], [extend + prefix], block_tables=[range(pages)])
    shards = torch.zeros(2, pages * page, LAYER.num_kv_heads, LAYER.head_dim)
    q = torch.zeros(plan.num_local_rows, LAYER.num_heads, LAYER.head_dim)
    k, v = torch.zeros(2, plan.num_local_rows, LAYER.num_kv_heads, LAYER.head_dim)
    moved = []
    for _ in range(2):  # ranks also compare versions in the first call
        cp.write_kv(plan, k, v, *shards)
        cp.attend(plan, q, *shards)
        moved.append((cp.sent_bytes, cp.received_bytes))
    agreements = 2 * (size - 1) * 8 * len(TERMS)
    sent, received = (now - then - agreements for then, now in zip(*moved, strict=True))
    return sent, received
