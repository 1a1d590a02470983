# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows: the calls of `ContextParallel` that are local."""

from __future__ import annotations

from typing import Any

import torch

from .._types import ScoreBias, Window
from ..context_parallel.attention import do_cp_attn_fia
from ..profiling.calls import announced
from ..sparse.cp_attention import cp_sparse_mla
from .layers.layer import LayerArguments, check_padding
from .layers.partials import AttentionOptions, check_axes
from .layers.prefetch import Prefetch
from .layers.rows import flat_rows
from .layers.sharded_attend import attend_shards
from .layers.write_attend import write_and_attend
from .plans.plan import ContextParallelPlan
from .plans.sharded_plan import ShardedPlan, check_plan
from .sparse.attend import attend_sparse_shards
from .sparse.inputs import refuse_mask
from .transport.exchange import RowExchange


class RankAttention:
    """Local attention of `ContextParallel`, over a plan and the pools of its rank."""

    _exchange: RowExchange

    @announced("ContextParallel.attend")
    def attend(
        self,
        plan: ContextParallelPlan,
        q_local: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        *,
        k_local: torch.Tensor | None = None,
        v_local: torch.Tensor | None = None,
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
        prefetched: Prefetch | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of this rank's rows over cached prefixes and new tokens.

        A row has the same bits as on a single rank. With "pass_q" and "ring", which merge partial
        results of ranks, its bits do not depend on timing. A row sees the keys that `causal`,
        `window` and the mask of the plan, if any, all allow.

        With `k_local`, the call writes new keys and values first, as ``write_kv`` does. Pools and
        results have the same bits as after two calls with the same exchange, but sooner: some KV
        heads travel while others are computed, and a rank of sharded pools stores its keys from
        those that "gather" brings. All ranks must then make this call with the same options, as
        always with a `ShardedPlan`; otherwise the call is local. If a request's prefix has new
        tokens of another request of the batch, sharded pools are written before keys travel.

        Parameters
        ----------
        plan : ContextParallelPlan
            The result of this object's `plan`.
        q_local : tensor [>= num_local_rows, num_heads, head_dim], float32, float16 or bfloat16
            Queries in the order of ``shard``; further rows are never read.
        k_cache, v_cache : tensors of the dtype of q_local
            Caches that ``write_kv`` has written, or that this call writes with `k_local`; with a
            placement, this rank's shards. If `v_cache` is None, the first `v_head_dim` elements of
            the keys are the values, as in the latent cache of MLA.
        k_local, v_local : tensors [>= num_local_rows, num_kv_heads, head_dim], optional
            New keys and values of this rank, as for ``write_kv``; only keys without `v_cache`.
        scale : float, default 1/sqrt(head_dim)
            Factor of the scores; required for head_dim > 256, rope_dim of `q_rope` included.
        causal, window, softcap
            See `cpattn.paged_attention`; `causal` is one bool for all sequences.
        bias, alibi_slopes, relative_bias : optional
            Added to scores, as in `cpattn.do_cp_attn_fia`; every rank passes the same. `bias` has a
            row for each new token of the batch, padding tokens included, and a column for each key
            of the sequence. The call reads it in place and never sends it. With whole pools,
            "gather" and "ring", a rank reads only the rows of its tokens; other rows may hold any
            numbers. Ranks compare the shape and dtype of `bias`, not its numbers.
        sinks : tensor [num_heads], float32, optional
            One logit per head that takes weight but has no value; it counts once over all ranks.
        q_rope, k_rope : tensors [>= num_local_rows, num_heads, rope_dim], as `k_cache`, optional
            The last dimensions of queries and keys, if stored apart; not with `k_local`.
        v_head_dim : int, optional
            Elements of a value; required without `v_cache`.
        k_scale, v_scale, kv_dtype
            Scales and dtype of 8-bit caches, as in `cpattn.do_cp_attn_fia`.
        prefetched : Prefetch, optional
            The result of ``prefetch``, whose next layer must be this layer. Its cached keys travel
            since the previous layer; keys of the next layer follow the new keys of this layer. The
            result has the same bits as with "gather" alone.
        out : tensor [num_rows, num_heads, v_head_dim] of the dtype of q_local, optional
            Receives the result, which is a view of it; each row must be contiguous.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_rows, num_heads, v_head_dim], of the dtype of q_local
            A result for each row of q_local; zeros for rows beyond this rank's tokens.
        lse : tensor [num_rows, num_heads], float32; only with ``return_lse``
            Natural log-sum-exp without sinks; -inf for rows beyond this rank's tokens.

        Raises
        ------
        TypeError
            If the plan is of `plan_decode`, `scale` is no number, or a flag is no bool. It is
            also raised if `out`, or a cache that is written, was made under
            ``torch.inference_mode()`` and the call is outside.
        ValueError
            If there are fewer rows than tokens of this rank, page ids exceed the caches, shapes or
            dtypes do not fit, padding tokens meet ``causal=False`` without a mask (others would see
            them), or ``write_kv`` would refuse the new rows. It is also raised if
            `prefetched` is of another plan or object, is not the latest, has no layer left, or has
            other caches or another window for this layer. Nothing has been written then.
        RuntimeError
            If all ranks must make the call, and another rank refuses its arguments, makes another
            call, has another plan, other rows or options, differs in whether it has `prefetched`,
            or does not answer.
        """
        options = AttentionOptions(
            scale, causal, window, softcap, sinks, k_scale, v_scale, kv_dtype,
            bias=bias, alibi_slopes=alibi_slopes, relative_bias=relative_bias,
        )  # fmt: skip
        if prefetched is not None and not isinstance(plan, ShardedPlan):
            raise ValueError("ContextParallel.attend: prefetched needs a plan of sharded pools")
        if isinstance(plan, ShardedPlan) or k_local is not None or v_local is not None:
            arguments = LayerArguments(
                q_local, k_cache, v_cache, k_local, v_local, q_rope, k_rope, v_head_dim, out,
                return_lse,
            )  # fmt: skip
            if isinstance(plan, ShardedPlan):
                return attend_shards(self._exchange, plan, arguments, options, prefetched)
            return write_and_attend(self._exchange, plan, arguments, options)
        check_axes("attend", "q_local", q_local, "head_dim")
        if q_rope is not None:
            check_axes("attend", "q_rope", q_rope, "rope_dim")
        if out is not None and (out.ndim != 3 or not out[0:1].is_contiguous()):
            raise ValueError(
                "ContextParallel.attend: out must be [num_rows, num_heads, v_head_dim] with "
                f"contiguous rows, got shape {list(out.shape)}, strides {list(out.stride())}"
            )
        check_plan("attend", plan)
        check_padding(plan, causal=causal)
        result: Any = do_cp_attn_fia(
            flat_rows(q_local), k_cache, v_cache, plan.metadata, block_tables=plan.block_tables,
            page_size=plan.page_size, num_heads=q_local.shape[1], num_kv_heads=k_cache.shape[-2],
            packed_custom_mask=plan.packed_custom_mask,
            q_rope=None if q_rope is None else flat_rows(q_rope), k_rope=k_rope,
            v_head_dim=v_head_dim,
            out=None if out is None else out.view(len(out), out.shape[1] * out.shape[2]),
            return_lse=return_lse, **options.keywords(),
        )  # fmt: skip
        v_dim = v_head_dim if v_cache is None else v_cache.shape[-1]
        shape = (*q_local.shape[:2], v_dim)
        if return_lse:
            return result[0].view(shape), result[1]
        return result.view(shape)

    @announced("ContextParallel.attend_sparse")
    def attend_sparse(
        self,
        plan: ContextParallelPlan,
        q_local: torch.Tensor,
        kv_cache: torch.Tensor,
        index_q_local: torch.Tensor,
        index_k_cache: torch.Tensor,
        weights_local: torch.Tensor,
        *,
        topk: int,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: torch.Tensor | None = None,
        index_k_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Sparse attention of this rank's rows: the indexer, then MLA over the selected keys.

        The call runs `cpattn.sparse.cp_sparse_mla` on the plan; a row has the same bits as on a
        single rank. Call ``write_kv`` first, with latents and index keys as its two tensors. The
        call is local, except with a `ShardedPlan`: all ranks then call it with the same options.

        With a placement, a row selects the same keys as from one pool, in the same order. With
        "pass_q", every rank scores the index keys that it holds, ranks merge their best keys, each
        attends to those it holds, and partial results merge in rank order. With "gather", index
        keys and selected latents travel, and bits are as with one pool. "auto" takes the exchange
        with the smaller bound on bytes, or "pass_q" if the index keys exceed `max_scratch_bytes`.
        Latents and queries travel in rounds that fit.

        Parameters
        ----------
        plan : ContextParallelPlan
            The result of this object's `plan`.
        q_local : tensor [>= num_local_rows, num_heads, head_dim], float32, float16 or bfloat16
            Queries in the order of ``shard``.
        kv_cache : tensor [num_slots, 1, head_dim], of the dtype of q_local
            Or [num_pages, page_size, 1, head_dim], or rows of 656 bytes, as in `cp_sparse_mla`.
            With a placement, this rank's shard, contiguous.
        index_q_local, index_k_cache, weights_local : tensors
            The indexer's `index_q`, `index_k_cache` and `weights`, as in `cp_sparse_mla`; with a
            placement, this rank's shard of the keys.
        topk : int
            Keys that a row selects, at least 1.
        sm_scale, d_v, attn_sink, index_k_scale
            Arguments of `cp_sparse_mla`.
        out : tensor [num_rows, num_heads, d_v] of the dtype of q_local, optional
            Receives the result and is returned.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_rows, num_heads, d_v], of the dtype of q_local
            A result for each row of q_local; zeros for rows beyond this rank's tokens.
        lse : tensor [num_rows, num_heads], float32; only with ``return_lse``
            Natural log-sum-exp without the sink; -inf for rows beyond this rank's tokens.

        Raises
        ------
        TypeError
            If an argument is of another type than stated.
        ValueError
            If the plan has a mask, which the indexer does not support, `cp_sparse_mla` refuses an
            argument, or, with a placement, shards are too small or `exchange` is "ring",
            "all_to_all" or "usp".
        RuntimeError
            With a placement, if another rank refuses its arguments, makes another call, has another
            plan, other rows or options, or does not answer.
        """
        if isinstance(plan, ShardedPlan):
            return attend_sparse_shards(
                self._exchange, plan, q_local, kv_cache, index_q_local, index_k_cache,
                weights_local, topk=topk, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink,
                index_k_scale=index_k_scale, out=out, return_lse=return_lse,
            )  # fmt: skip
        refuse_mask("attend_sparse", plan.packed_custom_mask)
        return cp_sparse_mla(
            q_local, kv_cache, index_q_local, index_k_cache, weights_local, plan.metadata,
            block_tables=plan.block_tables, page_size=plan.page_size, topk=topk, sm_scale=sm_scale,
            d_v=d_v, attn_sink=attn_sink, index_k_scale=index_k_scale, out=out,
            return_lse=return_lse,
        )  # fmt: skip
