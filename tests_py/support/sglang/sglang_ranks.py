# SPDX-License-Identifier: Apache-2.0
"""The installed sglang's context-parallel strategies on ranks of the simulator.

Its own methods make metadata, shard, pad, gather K and V, attend in halves and gather the result.
Ranks of the simulator share what modules have, so what sglang keeps in globals of a process, its
groups above all, is asked of the rank that runs: a group is `torch.distributed` itself. Pools and
attention are this library's.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import cpattn
from support.distributed.prefill_batches import Batch, Case, make_batch, slots_of

_WITH_PARALLEL = "cp.base", "cp.interleave", "cp.padding", "cp.zigzag", "dp_attention"


def _parallel() -> SimpleNamespace:
    """What `get_parallel` says on this rank."""
    size = dist.get_world_size()
    group = SimpleNamespace(all_gather_into_tensor=dist.all_gather_single, world_size=size)
    return SimpleNamespace(attn_cp_group=group, attn_cp_rank=dist.get_rank(), attn_cp_size=size)


@contextlib.contextmanager
def ranks_of_their_own(sglang: SimpleNamespace, size: int, strategy: str) -> Iterator[None]:
    """While a simulation runs, sglang asks it who it is."""
    pools: dict[int, Pool] = {}

    def pool_of_rank() -> Pool:
        return pools.setdefault(dist.get_rank(), Pool())

    split = {"tp_size": size, "attn_cp_size": size, "cp_strategy": strategy}
    context = sglang.runtime.get_context()
    with contextlib.ExitStack() as stack:
        stack.enter_context(context.override_server_args(enable_prefill_cp=True, **split))
        for name in _WITH_PARALLEL:
            module = importlib.import_module(f"sglang.srt.layers.{name}")
            stack.enter_context(mock.patch.object(module, "get_parallel", _parallel))
        stack.enter_context(mock.patch.object(sglang.zigzag, "get_token_to_kv_pool", pool_of_rank))
        yield


class Pool:
    """Where a rank keeps keys and values: as sglang's pools, one row for each slot."""

    k: torch.Tensor
    v: torch.Tensor

    def set_kv_buffer(
        self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        self.k[where.loc], self.v[where.loc] = k, v


def _forward_batch(sglang: SimpleNamespace, case: Case, batch: Batch) -> Any:
    tables, ends = batch.block_tables, zip(case.seq_lens, case.prefixes, strict=True)
    new = [slots_of(tables, s, n, case.page_size)[p:] for s, (n, p) in enumerate(ends)]
    return sglang.batch.ForwardBatch(
        forward_mode=sglang.batch.ForwardMode.EXTEND,
        batch_size=len(case.extend_lens),
        input_ids=torch.zeros(sum(case.extend_lens), dtype=torch.int64),
        req_pool_indices=torch.arange(len(case.extend_lens)),
        seq_lens=torch.tensor(case.seq_lens),
        out_cache_loc=torch.cat(new),
        seq_lens_sum=sum(case.seq_lens),
    )


def layer(
    sglang: SimpleNamespace, case: Case, spoil: Callable[[Any, int], None] | None = None
) -> torch.Tensor:
    """One layer of one prefill on this rank; the rows of the whole batch, [T, heads, dim]."""
    batch, rank, size = make_batch(case), dist.get_rank(), dist.get_world_size()
    zigzag, interleave = sglang.zigzag.ZigzagCPStrategy, sglang.interleave.InterleaveCPStrategy
    strategy = {"zigzag": zigzag, "interleave": interleave}[case.strategy](size)
    forward_batch = _forward_batch(sglang, case, batch)
    forward_batch.attn_cp_metadata = strategy.build_metadata(
        sum(case.extend_lens), case.seq_lens, list(case.extend_lens)
    )
    sglang.padding.pad_logical_token_to_physical(forward_batch.attn_cp_metadata)
    if spoil:
        spoil(forward_batch, rank)
    q, k, v = (
        strategy.shard_hidden_states(x, forward_batch)
        for x in (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    )
    if case.strategy == "interleave":  # which has no dense attention of its own
        whole = [strategy.gather_kv_cache(x, forward_batch) for x in (q, k, v)]
        return torch.cat([x.flatten(1) for x in whole], dim=1)
    pool = sglang.zigzag.get_token_to_kv_pool()
    pool.k, pool.v = batch.k_cache.clone(), batch.v_cache.clone()
    plain = SimpleNamespace(
        is_cross_attention=False, k_scale=None, v_scale=None, layer_id=0, attn_type=None
    )
    strategy.materialize_full_kv(forward_batch, plain, k, v)
    out = strategy.run_attention(q, forward_batch, "cpu", _attention(case, batch, pool))
    return strategy.gather_hidden_states(out, forward_batch)


def _attention(case: Case, batch: Batch, pool: Pool) -> Callable[..., torch.Tensor]:
    options = {"block_tables": batch.block_tables, "page_size": case.page_size}

    def attend(q: torch.Tensor, cu_seqlens_q: Any, kv_lens: Any, longest: int) -> torch.Tensor:
        lens = {"q_lens": cu_seqlens_q.diff().tolist(), "kv_lens": kv_lens.tolist()}
        scale = case.head_dim**-0.5
        return cpattn.paged_attention(
            q.contiguous(), pool.k, pool.v, scale=scale, **lens, **options
        )

    return attend
