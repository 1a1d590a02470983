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
from .layers.partials import AttentionOptions
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

        A row has the bits that it has on a single rank, or, where partial results of ranks are
        merged ("pass_q" and "ring"), bits that do not depend on timing. It sees what the mask of
        the plan lets it, if there is one, and `causal` and `window` besides.

        With `k_local` new keys and values are written first, as by ``write_kv``. Pools and results
        have the bits of both calls with the same exchange, but sooner: rows of some KV heads are on
        their way while others are attended to, and what "gather" brings to a rank of sharded pools
        is what that rank keeps of it, too. All ranks make this call then, and for a `ShardedPlan`
        in any case, with the same options; else it is local. Where one request of the batch has
        new tokens of another one as its prefix, sharded pools are written before keys travel.

        Parameters
        ----------
        plan : ContextParallelPlan
            The result of this object's `plan`.
        q_local : tensor [>= num_local_rows, num_heads, head_dim], float32, float16 or bfloat16
            Queries in the order of ``shard``; further rows are never read.
        k_cache, v_cache : tensors of the dtype of q_local
            Caches as in ``write_kv``, which comes first unless there is `k_local`; with a placement
            this rank's shards. Without `v_cache` (None) the first `v_head_dim` elements of the keys
            are the values, as in the latent cache of MLA.
        k_local, v_local : tensors [>= num_local_rows, num_kv_heads, head_dim], optional
            New keys and values of this rank, as for ``write_kv``; without `v_cache` keys alone.
        scale : float, default 1/sqrt(head_dim)
            Must be given for head_dim > 256; head_dim includes that of `q_rope`.
        causal : bool
            A token sees keys up to its own; False: all of its sequence.
        window : int or pair, optional
            Keys around a token's own that it sees, as in `cpattn.paged_attention`.
        softcap : float
            0 for none, else from 1e-37 to 1e37.
        bias, alibi_slopes, relative_bias : optional
            Added to scores, as in `cpattn.do_cp_attn_fia`. Every rank is given the same: `bias` is
            of the whole sequences, a row for each new token, padding tokens included, and a column
            for each key. It is read in place and never sent. Over whole pools and by "gather" and
            "ring" a rank reads the rows of its own tokens alone, so others may hold anything. Ranks
            compare shapes and dtypes of `bias`, not its numbers.
        sinks : tensor [num_heads], float32, optional
            One logit per head that takes weight but has no value: once, whatever the ranks.
        q_rope, k_rope : tensors [>= num_local_rows, num_heads, rope_dim], as `k_cache`, optional
            The last dimensions of queries and keys, where they are stored apart; not with
            `k_local`.
        v_head_dim : int, optional
            Elements of a value, where there is no `v_cache`.
        k_scale, v_scale, kv_dtype
            Of caches of codes of 8 bits, as in `cpattn.do_cp_attn_fia`.
        prefetched : Prefetch, optional
            The result of ``prefetch``, whose next layer is this: its cached keys are on their way
            since the layer before, and those of the layer after it follow the new keys of this one.
            The bits are those of "gather" without it.
        out : tensor [num_rows, num_heads, v_head_dim] of the dtype of q_local, optional
            Written, each row contiguous; the result is a view of it.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_rows, num_heads, v_head_dim], of the dtype of q_local
            Results for all rows of q_local; zeros in the further ones.
        lse : tensor [num_rows, num_heads], float32; only with ``return_lse``
            Natural logarithm, sinks not included; -inf in the further rows.

        Raises
        ------
        TypeError
            For a plan of `plan_decode`, a scale that is no number, and a flag that is no bool.
        ValueError
            For fewer rows than this rank has, page ids beyond the caches, shapes or dtypes that
            do not fit, and ``causal=False`` with padding tokens, which others would see, unless
            there is a mask; for new rows that ``write_kv`` refuses; for `prefetched` of another
            plan or object, with other caches or another window next, without a layer left, or
            before the last one that was made. Nothing has been written then.
        RuntimeError
            Where all ranks make the call, if another one refuses its arguments, makes another
            call, has another plan, other rows or options, or `prefetched` where this one has none,
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
        _check_three_axes("q_local", q_local, "head_dim")
        if q_rope is not None:
            _check_three_axes("q_rope", q_rope, "rope_dim")
        if out is not None and (out.ndim != 3 or not out[0:1].is_contiguous()):
            raise ValueError(
                "ContextParallel.attend: out must be [num_rows, num_heads, v_head_dim] with "
                f"contiguous rows, got shape {list(out.shape)}, strides {list(out.stride())}"
            )
        check_plan("attend", plan)
        check_padding(plan, causal=causal)
        result: Any = do_cp_attn_fia(
            flat_rows(q_local),
            k_cache,
            v_cache,
            plan.metadata,
            block_tables=plan.block_tables,
            page_size=plan.page_size,
            num_heads=q_local.shape[1],
            num_kv_heads=k_cache.shape[-2],
            packed_custom_mask=plan.packed_custom_mask,
            q_rope=None if q_rope is None else flat_rows(q_rope),
            k_rope=k_rope,
            v_head_dim=v_head_dim,
            out=None if out is None else out.view(len(out), out.shape[1] * out.shape[2]),
            return_lse=return_lse,
            **options.keywords(),
        )
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
        """Sparse attention of this rank's rows: the indexer, then MLA over what it selects.

        `cpattn.sparse.cp_sparse_mla` on the plan; a row has the bits that it has on a single rank.
        The caches are written by ``write_kv`` before, latents and index keys as its two tensors.
        Local, but for a `ShardedPlan`: all ranks call it then, with the same options.

        With a placement a row selects the keys that it selects of one pool, in the same order. By
        the exchange "pass_q" every rank scores the index keys that it holds, the best of all
        ranks are merged, each rank attends to what it holds of them, and partial results are
        merged in rank order. By "gather" index keys travel, and the latents that were selected:
        the bits are those of one pool. "auto" takes the one of the fewest bytes at most, and
        "pass_q" where the index keys do not fit into `max_scratch_bytes`; latents and queries go in
        rounds that do.

        Parameters
        ----------
        plan : ContextParallelPlan
            The result of this object's `plan`.
        q_local : tensor [>= num_local_rows, num_heads, head_dim], float32, float16 or bfloat16
            Queries in the order of ``shard``.
        kv_cache : tensor [num_slots, 1, head_dim], of the dtype of q_local
            Or [num_pages, page_size, 1, head_dim], or rows of 656 bytes, as for `cp_sparse_mla`.
            With a placement, this rank's shard, contiguous.
        index_q_local, index_k_cache, weights_local : tensors
            The indexer's `index_q`, `index_k_cache` and `weights`, as in `cp_sparse_mla`; with a
            placement, this rank's shard of the keys.
        topk : int
            Keys for each row, at least 1.
        sm_scale, d_v, attn_sink, index_k_scale
            As of `cp_sparse_mla`.
        out : tensor [num_rows, num_heads, d_v] of the dtype of q_local, optional
            Written and returned.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_rows, num_heads, d_v], of the dtype of q_local
            Results for all rows of q_local; zeros in the further ones.
        lse : tensor [num_rows, num_heads], float32; only with ``return_lse``
            Natural logarithm, without the sink; -inf in the further rows.

        Raises
        ------
        TypeError
            If an argument is of another type than stated.
        ValueError
            For a plan with a mask, which the indexer does not know, what `cp_sparse_mla` refuses,
            and, with a placement, shards that are too small, and the exchanges of heads and of
            rings.
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
            q_local,
            kv_cache,
            index_q_local,
            index_k_cache,
            weights_local,
            plan.metadata,
            block_tables=plan.block_tables,
            page_size=plan.page_size,
            topk=topk,
            sm_scale=sm_scale,
            d_v=d_v,
            attn_sink=attn_sink,
            index_k_scale=index_k_scale,
            out=out,
            return_lse=return_lse,
        )


def _check_three_axes(name: str, x: torch.Tensor, last: str) -> None:
    if x.ndim != 3:
        raise ValueError(
            f"ContextParallel.attend: {name} must be [num_rows, num_heads, {last}], "
            f"got shape {list(x.shape)}"
        )
