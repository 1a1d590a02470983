# SPDX-License-Identifier: Apache-2.0
"""Ranks with sharded pools of latents and index keys."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import cpattn
from cpattn.distributed import ContextParallel, DecodePlan, ShardedPlan
from cpattn.distributed.layers.choice import choose_sparse
from cpattn.distributed.sparse import decode as sparse_decode
from cpattn.distributed.sparse import gather as sparse_gather
from cpattn.distributed.sparse import pass_q as sparse_pass_q
from cpattn.distributed.sparse.inputs import checked_sparse_inputs
from support.distributed.prefill_batches import new_slots
from support.distributed.sharded_worker import (
    PLACEMENTS,
    noted_events,
    received_bytes,
    shard_of,
    unread,
)
from support.sparse.indexer_batch import ROW_FORMS, IndexerBatch, in_form

HEADS = 4
SCALE = 0.2


@dataclass(frozen=True)
class SparseRun:
    name: str
    extend_lens: tuple[int, ...] = (13, 1, 40, 0, 5)
    prefix_lens: tuple[int, ...] = (20, 3, 33, 9, 0)
    topk: int = 8
    strategy: str = "zigzag"
    placement: str = "pages"
    exchange: str = "pass_q"
    page_size: int = 16
    index_dtype: str = "bfloat16"
    form: str = ROW_FORMS[0]
    scaled: bool = False
    kv_dtype: torch.dtype = torch.float32
    fp8_rows: bool = False  # latents are rows of 656 bytes
    sinks: bool = False
    max_scratch_bytes: int = 256 << 20
    num_tokens: int | None = None
    pad_to_physical: bool = False

    def __str__(self) -> str:
        return f"{self.exchange}, {self.placement}, {self.strategy}, {self.name}"

    @property
    def v_head_dim(self) -> int:
        return 512 if self.fp8_rows else 32

    def batch(self) -> IndexerBatch:
        """Return queries and keys of the indexer: small integers with many equal scores."""
        return IndexerBatch(
            self.extend_lens, self.prefix_lens, dtype=self.index_dtype, form=self.form,
            scaled=self.scaled, topk=self.topk, heads=4, page_size=self.page_size,
            strategy="contiguous",
        )  # fmt: skip

    def attention(self, batch: IndexerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries of all tokens, and latents in a whole pool."""
        draw = torch.Generator().manual_seed(7)
        slots, tokens = batch.num_pages * batch.page_size, len(batch.q)
        if self.fp8_rows:
            nope, rope = (torch.randn(slots, n, generator=draw).bfloat16() for n in (512, 64))
            rows = cpattn.sparse.quantize_kv_rows(nope, rope).view(slots, 1, 656)
            return torch.randn(tokens, HEADS, 576, generator=draw).bfloat16(), rows
        kv = torch.randn(slots, 1, 48, generator=draw).to(self.kv_dtype)
        return torch.randn(tokens, HEADS, 48, generator=draw).to(self.kv_dtype), kv

    def attend_options(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 2, HEADS) if self.sinks else None
        return {"topk": self.topk, "sm_scale": SCALE, "d_v": self.v_head_dim, "attn_sink": sinks}

    def alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's result in one process with whole pools."""
        batch = self.batch()
        q, kv = self.attention(batch)
        index_q = torch.from_numpy(batch.q).to(batch.q_dtype)
        result: tuple[torch.Tensor, torch.Tensor] = cpattn.sparse.cp_sparse_mla(
            q, kv, index_q, batch.cache, torch.from_numpy(batch.weights), batch.metadata[0],
            block_tables=batch.block_tables, page_size=batch.page_size,
            index_k_scale=batch.k_scale, return_lse=True, **self.attend_options(),
        )  # fmt: skip
        return result


def run_sparse_layers(rank: int, runs: list[SparseRun]) -> dict[SparseRun, dict[str, Any]]:
    return {run: _run(run) for run in runs}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


@contextlib.contextmanager
def noted_selections(selected: list[torch.Tensor]) -> Iterator[None]:
    """Record the selections of this rank's rows in each round; positions if queries travel."""

    def noted(attend: Callable[..., Any], *arguments: Any) -> Any:
        selected.append(arguments[-1])
        return attend(*arguments)

    with contextlib.ExitStack() as stack:
        for module in (sparse_pass_q, sparse_gather):
            attend = partial(noted, module._attend)
            stack.enter_context(mock.patch.object(module, "_attend", attend))
        yield


def make_cp(run: SparseRun) -> ContextParallel:
    placement = PLACEMENTS[run.placement](dist.get_world_size(), run.page_size)
    return ContextParallel(
        dist.group.WORLD, strategy=run.strategy, page_size=run.page_size, placement=placement,
        exchange=run.exchange, max_scratch_bytes=run.max_scratch_bytes,
    )  # fmt: skip


def layer_arguments(
    run: SparseRun,
    cp: ContextParallel,
    plan: ShardedPlan | DecodePlan,
    local: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Make a layer's arguments on this rank; `write_kv` writes new tokens into its pools."""
    batch, rank, placement = run.batch(), dist.get_rank(), plan.placement
    q, kv = run.attention(batch)
    codes = batch.in_pages(batch.keys, batch.dim, 0.0).to(batch.q_dtype).view(-1, 1, batch.dim)
    scales = batch.in_pages(batch.scales, 1, 0.0).view(-1, 1, 1)
    new = new_slots(batch.block_tables, batch.prefix_lens, batch.kv_lens, batch.page_size)
    owned = placement.owner_of(new) == rank
    slots = np.where(owned, placement.local_index(new), -1)
    np.testing.assert_array_equal(plan.local_slots[: len(new)], slots)

    def sharded(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard without new tokens, and its rows of the new tokens."""
        before = _bytes(pool.clone())
        before[new] = unread(before)
        shard = shard_of(placement, rank, before, run.page_size)
        return shard.view(pool.dtype), local(_bytes(pool)[new]).view(pool.dtype)

    (kv_shard, kv_rows), (index_shard, index_rows), (scale_shard, scale_rows) = (
        sharded(pool) for pool in (kv, codes, scales)
    )
    cp.write_kv(plan, kv_rows, index_rows, kv_shard, index_shard)
    cp.write_kv(plan, scale_rows, None, scale_shard, None)
    index_q, weights = torch.from_numpy(batch.q).to(batch.q_dtype), torch.from_numpy(batch.weights)
    rows = [local(q), local(_bytes(index_q)).view(index_q.dtype), local(weights)]
    is_packed = run.index_dtype == "uint8"
    index_k, scale = in_form(index_shard, scale_shard, run.form, run.page_size, is_packed)
    options = run.attend_options() | {"index_k_scale": scale if run.scaled else None}
    return [rows[0], kv_shard, rows[1], index_k, rows[2]], options


def _run(run: SparseRun) -> dict[str, Any]:
    """Return results of a prefill, the selected positions, and the traffic."""
    cp, batch = make_cp(run), run.batch()
    plan = cp.plan(
        batch.extend_lens, batch.kv_lens, block_tables=batch.block_tables,
        num_tokens=run.num_tokens, pad_to_physical=run.pad_to_physical,
    )  # fmt: skip

    def local(x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, x.new_zeros(plan.num_tokens - len(x), *x.shape[1:])])
        return cp.shard(plan, x)

    arguments, options = layer_arguments(run, cp, plan, local)
    selected: list[torch.Tensor] = []
    with noted_selections(selected), noted_events(cp, "attend_sparse") as events:
        out, lse = cp.attend_sparse(plan, *arguments, **options, return_lse=True)
    inputs = checked_sparse_inputs(
        "attend_sparse", plan.num_local_rows, run.page_size, *arguments, **options
    )
    positions = torch.cat([torch.empty(0, run.topk, dtype=torch.int32), *selected])
    real = slice(0, sum(run.extend_lens))
    return {
        "out": cp.gather(plan, out)[real],
        "lse": cp.gather(plan, lse)[real],
        "positions": cp.gather(plan, positions)[real],
        "rounds": len(selected),
        "padding": out[plan.num_local_rows :],
        "received": received_bytes(events, "attend_sparse"),
        "choice": choose_sparse(plan, inputs.sizes()),
    }


def run_sparse_steps(rank: int, runs: list[SparseRun]) -> dict[SparseRun, dict[str, torch.Tensor]]:
    return {run: _step(run) for run in runs}


def _step(run: SparseRun) -> dict[str, torch.Tensor]:
    """Return results and selections of a decode step; every rank has its queries."""
    cp, batch = make_cp(run), run.batch()
    plan = cp.plan_decode(batch.kv_lens, q_lens=batch.extend_lens, block_tables=batch.block_tables)
    arguments, options = layer_arguments(run, cp, plan, lambda x: x)
    selected: list[torch.Tensor] = []
    rows_of_rank = sparse_decode.rows_of_rank

    def noted(shares: Any, rank: int, request: Any, positions: torch.Tensor) -> torch.Tensor:
        selected.append(positions)
        return rows_of_rank(shares, rank, request, positions)

    with mock.patch.object(sparse_decode, "rows_of_rank", noted):
        out, lse = cp.decode_sparse(plan, *arguments, **options, return_lse=True)
    return {"out": out, "lse": lse, "positions": selected[0]}
