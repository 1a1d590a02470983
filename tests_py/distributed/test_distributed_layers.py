# SPDX-License-Identifier: Apache-2.0
"""Layers with masks, windows, codes and latents are right by each exchange and way of writing."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import cpattn
from cpattn.distributed import ContextParallel
from support.distributed import layer_worker as worker
from support.distributed import sparse_worker
from support.distributed.answers import assert_layer, by_size
from support.distributed.distributed_worker import run_world
from support.distributed.layer_worker import REPLICATED, SHARDED, LayerRun, Rank
from support.distributed.sharded_worker import EXCHANGES, STATE_EXCHANGES, Step, equal, written_step
from support.distributed.sparse_worker import SparseRun

RUNS = tuple(REPLICATED + SHARDED)
RUNS_OF = {2: RUNS[::2], 3: RUNS}


@pytest.mark.parametrize(("size", "run"), by_size(RUNS_OF))
def test_layer_is_that_of_the_oracle_by_every_way(answers_of, size, run):
    """A call that also writes is right, and so are cached keys sent a layer ahead."""
    assert_layer(answers_of(size, worker.run_layers, RUNS_OF[size]), run)


def test_sparse_layers_over_whole_pools_are_those_without_a_group(world):
    cp = ContextParallel(world, page_size=worker.PAGE)
    lens = worker.EXTENDS, worker.LENGTHS
    plan = cp.plan(*lens, block_tables=worker.TABLES)
    tokens, pages, heads = worker.TOKENS, worker.SLOTS // worker.PAGE, worker.HEADS
    shapes = ((tokens, heads, 64), (worker.SLOTS, 1, 64), (tokens, 2, 32), (pages, worker.PAGE, 32))
    q, latents, index_q, index_keys, weights = worker.tensors(3, *shapes, (tokens, 2))
    options = {"topk": 6, "sm_scale": 0.2, "d_v": 32, "return_lse": True}
    metadata = cpattn.build_cp_metadata(*lens, cp_rank=0, cp_size=1)
    expected = cpattn.sparse.cp_sparse_mla(
        q, latents, index_q, index_keys, weights, metadata, block_tables=worker.TABLES,
        page_size=worker.PAGE, **options,
    )  # fmt: skip
    found = cp.attend_sparse(plan, q, latents, index_q, index_keys, weights, **options)
    assert equal(found, expected)


def test_heads_of_one_dimension_with_gaps_are_queries(world):
    """Their last axis has one element, so they count as contiguous with any stride."""
    cp = ContextParallel(world, page_size=4)
    plan = cp.plan([3], [5], block_tables=[[2, 0]])
    wide, keys, values = worker.tensors(7, (3, 2, 13), (12, 2, 1), (12, 2, 1))
    gaps = wide[:, :, :1]
    assert gaps.stride(1) == 13
    out, wanted = (cp.attend(plan, q, keys, values) for q in (gaps, gaps.contiguous()))
    assert torch.equal(out, wanted)


def run_with_other_defaults(rank):
    """Return calls whose results change with the defaults of torch for dtypes and devices."""
    calls = {}
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("ring", "heads"))
    runs = [LayerRun("plain", name, "pages") for name in (*EXCHANGES, "usp")]
    for run in (LayerRun("plain"), *runs):
        one = Rank(run, mesh if run.exchange == "usp" else None)
        for writes in (True, False):
            calls[run, writes] = partial(one.attend, one.layer, writes=writes)
    cp, plan, queries, shards = written_step(rank, Step("drafts", (90, 40), (3, 5)), "pages")
    for name in STATE_EXCHANGES:
        options = {"return_lse": True, "exchange": name}
        calls[name] = partial(cp.decode, plan, *queries.values(), *shards, **options)
    for run in (SparseRun("plain", exchange=name) for name in ("pass_q", "gather")):
        cp, batch = sparse_worker.make_cp(run), run.batch()
        lens, tables = (batch.extend_lens, batch.kv_lens), batch.block_tables
        plan = cp.plan(*lens, block_tables=tables)
        step = cp.plan_decode(lens[1], q_lens=lens[0], block_tables=tables)
        for call, of, local in (
            (cp.attend_sparse, plan, partial(cp.shard, plan)),
            (cp.decode_sparse, step, lambda x: x),
        ):
            given, options = sparse_worker.layer_arguments(run, cp, of, local)
            calls[run, call.__name__] = partial(call, of, *given, **options, return_lse=True)
    changed = []
    for is_connected in (False, True):
        if is_connected:
            cp.topology()  # from now on the ranks share memory
        for name, call in calls.items():
            expected = call()
            torch.set_default_dtype(torch.bfloat16)
            try:
                with torch.device("meta"):
                    found = call()
            finally:
                torch.set_default_dtype(torch.float32)
            if not equal(found, expected):
                changed.append(str(name))
    return changed


def test_results_do_not_depend_on_defaults_of_torch(tmp_path):
    assert run_world(2, tmp_path, run_with_other_defaults) == [[], []]
