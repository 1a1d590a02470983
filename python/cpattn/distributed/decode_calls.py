# SPDX-License-Identifier: Apache-2.0
"""Calls of `ContextParallel` that decode over sharded KV pools."""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import at_least
from .._types import ScoreBias, Window
from ..kv import Placement
from ..profiling.calls import announced
from .layers.decode import DecodeArguments, decode
from .layers.decode_states import heads_of_ranks
from .layers.partials import AttentionOptions
from .plans.sharded_plan import DecodePlan, make_decode_plan
from .sparse.decode import decode_sparse
from .transport.exchange import RowExchange


class DecodeCalls:
    """Decode steps of `ContextParallel` with a placement."""

    placement: Placement | None = None
    page_size: int
    cp_rank: int
    cp_size: int
    _exchange: RowExchange

    @announced("ContextParallel.plan_decode")
    def plan_decode(
        self,
        kv_lens: Any,
        *,
        block_tables: Any,
        q_lens: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
    ) -> DecodePlan:
        """Plan a decode step over sharded pools, without communication.

        Parameters
        ----------
        kv_lens : ints [bs]
            Tokens of each request, the new ones included.
        block_tables : ints [bs, >= ceil(max(kv_lens) / page_size)]
            Logical pages of each request, as for ``plan``.
        q_lens : ints [bs], optional
            New tokens of each request, one by default. Several tokens, such as drafts, are verified
            together: each sees the keys up to its own, on any rank.
        custom_mask, packed_custom_mask : tensors, optional
            Mask of visible keys, as for ``plan``; for a tree of drafts, for example.

        Returns
        -------
        DecodePlan
            Plan of this rank, for all layers.

        Raises
        ------
        TypeError
            If lengths or tables are no integers, or a mask is no tensor.
        ValueError
            If there is no placement, lengths do not match, a page id is negative, tables are too
            narrow, tokens share a slot, or a mask has another dtype or size.
        """
        if self.placement is None:
            raise ValueError("ContextParallel.plan_decode: needs a placement of the pools")
        return make_decode_plan(
            kv_lens, q_lens=q_lens, block_tables=block_tables, page_size=self.page_size,
            placement=self.placement, cp_rank=self.cp_rank, custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
        )  # fmt: skip

    @announced("ContextParallel.decode")
    def decode(
        self,
        plan: DecodePlan,
        q: torch.Tensor,
        k_shard: torch.Tensor,
        v_shard: torch.Tensor | None,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: Window = None,
        softcap: float = 0.0,
        bias: ScoreBias = None,
        alibi_slopes: torch.Tensor | None = None,
        relative_bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        v_head_dim: int | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_dtype: str | None = None,
        batch_invariant: bool = False,
        num_heads: int | None = None,
        out_heads: str = "all",
        exchange: str = "auto",
        return_lse: bool = False,
    ) -> Any:
        """Attention of all ranks' queries over the keys of all ranks.

        Each rank attends to the keys that it holds. Ranks exchange partial results with their LSE
        and merge them in rank order, so a row has the same bits on every rank, for any `exchange`
        and `out_heads`. Scratch: a partial result of all queries for each rank; with "all_to_all",
        of this rank's heads only.

        Parameters
        ----------
        plan : DecodePlan
            The result of this object's `plan_decode`, for the same step on every rank.
        q : tensor [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
            Queries by request, the same on every rank; with `num_heads`, only this rank's heads.
        k_shard, v_shard : tensors of the dtype of q, or of codes of 8 bits
            This rank's pools; call ``write_kv`` first. If `v_shard` is None, the first `v_head_dim`
            elements of the keys are the values.
        scale, causal, window, softcap, bias, alibi_slopes, relative_bias, sinks, q_rope, k_rope
            See ``attend``; biases are for all heads and queries.
        v_head_dim, k_scale, v_scale, kv_dtype
            See ``attend``.
        batch_invariant : bool
            Whether a row's bits are independent of the rest of the batch, as in
            `cpattn.paged_attention`.
        num_heads : int, optional
            Query heads of all ranks, if q has only the heads of `head_range`, as after
            tensor-parallel projections over these ranks; the call then gathers q first. Sinks are
            for all heads. Default: q has all heads.
        out_heads : {"all", "own"}
            Heads of the result on every rank: all, or those of `head_range`, which tensor-parallel
            projections after attention need.
        exchange : {"auto", "gather", "all_to_all"}
            Communication of partial results: "gather" sends all of them to every rank; "all_to_all"
            sends those of a head to the rank of this head (Helix), which sends merged results on if
            `out_heads` is "all". "auto" takes what `choose_exchange` returns for the plan. Ranks of
            one host send none once `topology` has found that they share memory.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_tokens, num_heads, v_head_dim], of the dtype of q
            Results of all heads, or of this rank's heads.
        lse : tensor [num_tokens, num_heads], float32; only with ``return_lse``
            Natural log-sum-exp without sinks, of the same heads.

        Raises
        ------
        TypeError
            If an argument is of another type than stated.
        ValueError
            If the plan is of another rank, queries or heads differ in number, pools are too small
            for the plan, a name is unknown, or `cpattn.paged_attention` refuses an argument.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan, other
            queries or options, or does not answer.
        """
        options = AttentionOptions(
            scale, causal, window, softcap, sinks, k_scale, v_scale, kv_dtype, batch_invariant,
            bias, alibi_slopes, relative_bias,
        )  # fmt: skip
        arguments = DecodeArguments(
            q, k_shard, v_shard, q_rope, k_rope, v_head_dim, num_heads, out_heads, exchange,
            return_lse,
        )  # fmt: skip
        return decode(self._exchange, plan, arguments, options)

    @announced("ContextParallel.decode_sparse")
    def decode_sparse(
        self,
        plan: DecodePlan,
        q: torch.Tensor,
        kv_shard: torch.Tensor,
        index_q: torch.Tensor,
        index_k_shard: torch.Tensor,
        weights: torch.Tensor,
        *,
        topk: int,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: torch.Tensor | None = None,
        index_k_scale: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Sparse attention of queries that every rank has, over the keys of all ranks.

        A row selects the same keys as from one pool, as in ``attend_sparse``: each rank scores the
        index keys that it holds, and the ranks merge their best keys. Each rank attends to the
        selected keys that it holds. Partial results merge in rank order, so every rank has the same
        bits. Scratch: for each rank 8 * topk bytes and a partial result of all queries, and a copy
        of this rank's index keys of the batch.

        Parameters
        ----------
        plan : DecodePlan
            The result of this object's `plan_decode`, for the same step on every rank.
        q : tensor [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
            Queries, request after request, the same on every rank.
        kv_shard, index_k_shard : tensors
            This rank's pools of latents and index keys, as for ``attend_sparse``.
        index_q, weights : tensors
            The indexer's queries and weights, as for ``attend_sparse``; a row for each of q.
        topk, sm_scale, d_v, attn_sink, index_k_scale
            See ``attend_sparse``.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_tokens, num_heads, d_v], of the dtype of q
        lse : tensor [num_tokens, num_heads], float32; only with ``return_lse``
            Natural log-sum-exp without the sink.

        Raises
        ------
        TypeError
            If an argument is of another type than stated.
        ValueError
            If the plan is of another rank or has a mask, which the indexer does not support,
            queries differ in number, pools are too small for the plan, or
            `cpattn.sparse.cp_sparse_mla` refuses an argument.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan, other
            queries or options, or does not answer.
        """
        return decode_sparse(
            self._exchange, plan, q, kv_shard, index_q, index_k_shard, weights,
            return_lse=return_lse, topk=topk, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink,
            index_k_scale=index_k_scale,
        )  # fmt: skip

    def head_range(self, num_heads: int) -> slice:
        """Return the query heads that ``decode`` takes as this rank's own. Local.

        Parameters
        ----------
        num_heads : int
            Query heads of the layer.

        Returns
        -------
        slice
            Rank r has heads ``num_heads * r // cp_size`` up to the first head of rank r + 1, as
            even as possible. With fewer heads than ranks, some ranks have none.

        Raises
        ------
        TypeError, ValueError
            If `num_heads` is no integer or below 1.
        """
        number = at_least(1, num_heads, "ContextParallel.head_range", "num_heads")
        return heads_of_ranks(number, self.cp_size)[self.cp_rank]
