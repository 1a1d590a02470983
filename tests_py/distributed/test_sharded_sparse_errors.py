# SPDX-License-Identifier: Apache-2.0
"""What sparse attention over sharded pools refuses, before any rows travel."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from support.distributed.sharded_worker import PLACEMENTS

TABLES = [[5, 3, 9], [2, 7, 0]]
LENS = ([4, 6], [9, 6])


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=1))
    yield
    dist.destroy_process_group()


def make_cp(**options):
    placement = PLACEMENTS["pages"](1, 4)
    return ContextParallel(dist.group.WORLD, page_size=4, placement=placement, **options)


SPARSE = {
    "q": torch.zeros(10, 2, 32),
    "kv": torch.zeros(40, 1, 32),
    "index_q": torch.zeros(10, 1, 16),
    "index_k": torch.zeros(10, 4, 16),
    "weights": torch.zeros(10, 1),
}
SPARSE_OPTIONS = {"topk": 2, "sm_scale": 1.0, "d_v": 16}


def attend_sparse(cp, changes, **plan_options):
    arguments = SPARSE | SPARSE_OPTIONS | changes
    plan = cp.plan(*LENS, block_tables=TABLES, **plan_options)
    return cp.attend_sparse(plan, *(arguments.pop(name) for name in SPARSE), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(9, 2, 32)}, "q must have at least the 10 rows of the plan, got"),
        ({"weights": torch.zeros(9, 1)}, "weights must have at least the 10 rows of the plan"),
        ({"index_q": torch.zeros(11, 1, 16)}, "q, index_q and weights must have as many rows"),
        ({"kv": torch.zeros(36, 1, 32)}, "the shard of rank 0 must have the 40 rows"),
        ({"index_k": torch.zeros(9, 4, 16)}, "the shard of rank 0 must have the 40 rows"),
        ({"index_k": torch.zeros(36, 1, 16)}, "the shard of rank 0 must have the 40 rows"),
        ({"kv": torch.zeros(40, 2, 32)[:, :1]}, "kv must be contiguous, got strides"),
        ({"out": torch.zeros(10, 2, 32)}, r"out must be \[10, 2, 16\] of torch.float32, got"),
    ],
)
def test_attend_sparse_refuses(changes, message):
    with pytest.raises(ValueError, match=f"^ContextParallel.attend_sparse: {message}"):
        attend_sparse(make_cp(), changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q must have the 2 rows of the plan, got 10"),
        ({"q": torch.zeros(1, 2, 32)}, "q must have at least the 2 rows of the plan, got"),
        ({"kv": torch.zeros(36, 1, 32)}, "the shard of rank 0 must have the 40 rows"),
    ],
)
def test_decode_sparse_refuses(changes, message):
    cp = make_cp()
    plan = cp.plan_decode([9, 6], block_tables=TABLES)
    rows = {name: SPARSE[name][:2] for name in ("q", "index_q", "weights")} if changes else {}
    arguments = SPARSE | rows | changes
    with pytest.raises(ValueError, match=f"^ContextParallel.decode_sparse: {message}"):
        cp.decode_sparse(plan, *arguments.values(), **SPARSE_OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 0}, "topk must be in"),
        ({"d_v": 0}, r"d_v must be in \[1, 576\]"),
        ({"index_k": torch.zeros(40, 16)}, "index_k_cache must be"),
        ({"weights": torch.zeros(10, 3)}, "weights must"),
        ({"attn_sink": torch.zeros(3)}, "attn_sink must have shape"),
    ],
)
def test_what_sparse_attention_refuses_is_refused_before_rows_travel(changes, message):
    with pytest.raises(ValueError, match=f"^cp_sparse_mla: {message}"):
        attend_sparse(make_cp(), changes)


def test_attend_sparse_refuses_what_has_no_meaning_for_it():
    with pytest.raises(ValueError, match="attend_sparse: plan must have no mask"):
        attend_sparse(make_cp(), {}, custom_mask=torch.ones(4 * 9 + 6 * 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="attend_sparse: exchange must be auto or pass_q"):
        attend_sparse(make_cp(exchange="ring"), {})
    with pytest.raises(TypeError, match=r"attend_sparse: kv must be a torch\.Tensor, got list"):
        attend_sparse(make_cp(), {"kv": [1.0]})
    with pytest.raises(TypeError, match="attend_sparse: return_lse must be a bool"):
        attend_sparse(make_cp(), {"return_lse": 1})
