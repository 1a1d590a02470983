# SPDX-License-Identifier: Apache-2.0
"""The calls of `ContextParallel` over KV pools of which each rank holds a share."""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import at_least, flag
from ..kv import Placement
from .choice import ExchangeChoice, choose
from .exchange import NO_TERMS, RowExchange
from .heads import LayerSizes
from .partials import AttentionOptions, attend_part, checked_inputs, merged_columns
from .plan import ContextParallelPlan
from .sharded_plan import DecodePlan, ShardedPlan, make_decode_plan


class ShardedAttention:
    """What `ContextParallel` does where it was given a placement."""

    placement: Placement | None = None
    page_size: int
    cp_rank: int
    cp_size: int
    _exchange: RowExchange

    def plan_decode(
        self,
        kv_lens: Any,
        *,
        block_tables: Any,
        q_lens: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
    ) -> DecodePlan:
        """Plan a decode step over sharded pools. Local.

        Parameters
        ----------
        kv_lens : ints [bs]
            Tokens of each request, the new ones included.
        block_tables : ints [bs, >= ceil(max(kv_lens) / page_size)]
            Logical pages of each request, as for ``plan``.
        q_lens : ints [bs], optional
            New tokens of each request, one by default. More are verified together, such as drafts:
            each sees the keys up to its own, whoever holds them.
        custom_mask, packed_custom_mask : tensors, optional
            Which keys tokens see, as for ``plan``; a tree of drafts, for example.

        Returns
        -------
        DecodePlan
            Of this rank; for all layers.

        Raises
        ------
        TypeError
            For lengths and tables that are no integers, and a mask that is no tensor.
        ValueError
            Without a placement; for lengths that do not match, negative page ids, tables that are
            too narrow, tokens that share a slot, and a mask of another dtype or size.
        """
        if self.placement is None:
            raise ValueError("ContextParallel.plan_decode: needs a placement of the pools")
        return make_decode_plan(
            kv_lens,
            q_lens=q_lens,
            block_tables=block_tables,
            page_size=self.page_size,
            placement=self.placement,
            cp_rank=self.cp_rank,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
        )

    def decode(
        self,
        plan: DecodePlan,
        q: torch.Tensor,
        k_shard: torch.Tensor,
        v_shard: torch.Tensor | None,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        v_head_dim: int | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_dtype: str | None = None,
        batch_invariant: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """Attention of queries that every rank has, over the keys of all ranks.

        Each rank attends to the keys that it holds; partial results and their LSE are exchanged and
        merged in rank order, so that every rank has the same bits. Scratch: a partial result of all
        queries for each rank.

        Parameters
        ----------
        plan : DecodePlan
            Of this object's `plan_decode`, for the same step on every rank.
        q : tensor [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
            Request after request, the same on every rank.
        k_shard, v_shard : tensors of the dtype of q, or of codes of 8 bits
            This rank's pools, as for ``write_kv``, which comes first. Without `v_shard` (None) the
            first `v_head_dim` elements of the keys are the values.
        scale, causal, window, softcap, sinks, v_head_dim, k_scale, v_scale, kv_dtype
            As of ``attend``.
        batch_invariant : bool
            Whether a row's bits are independent of the rest of the batch, as in
            `cpattn.paged_attention`.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_tokens, num_heads, v_head_dim], of the dtype of q
        lse : tensor [num_tokens, num_heads], float32; only with ``return_lse``
            Natural logarithm, sinks not included.

        Raises
        ------
        TypeError
            If an argument is of another type than stated.
        ValueError
            For a plan of another rank, another number of queries, pools that are too small for the
            plan, and what `cpattn.paged_attention` refuses.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan, other
            queries or options, or does not answer.
        """
        terms: dict[str, int] = {}
        with self._exchange.agreement("decode", getattr(plan, "terms", NO_TERMS), terms) as parts:
            self._check_decode_plan("decode", plan)
            return_lse = flag(return_lse, "ContextParallel.decode", "return_lse")
            options = AttentionOptions(
                scale, causal, window, softcap, sinks, k_scale, v_scale, kv_dtype, batch_invariant
            )
            inputs = checked_inputs("decode", options, q, k_shard, v_shard, v_head_dim)
            if len(q) != plan.num_tokens:
                raise ValueError(
                    f"ContextParallel.decode: q must have the {plan.num_tokens} rows of the plan, "
                    f"got {len(q)}"
                )
            plan.batch.check_pool("decode", self.cp_rank, len(inputs.k))
            parts.append(q.flatten(1))
            terms["options"] = inputs.digest()
        calls = plan.batch.calls(self.cp_rank, slice(0, len(q)), causal=causal, window=window)
        part, part_lse = attend_part(calls, q, inputs.k, inputs.v, inputs.options)
        num_rows = [len(q)] * self.cp_size
        outs, lses = self._exchange.all_rows("decode", num_rows, [part.flatten(1), part_lse])
        result = merged_columns(outs, lses, self.cp_size, inputs.options.sinks)
        return result if return_lse else result[0]

    def choose_exchange(
        self,
        plan: ContextParallelPlan,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        element_bytes: int = 2,
        shares_values: bool = False,
    ) -> ExchangeChoice:
        """What ``attend`` with the exchange "auto" does of a layer, and why. Local.

        Of "gather", "all_to_all" and "pass_q" the one by which the busiest rank receives the fewest
        bytes: with few new tokens behind long prefixes their queries are less than the keys. Of
        equal ones the first. "all_to_all" is left out where the heads would be uneven, "pass_q"
        where rotary dimensions of keys are apart. "ring" takes the place of "gather" where a KV
        head of the context does not fit into `max_scratch_bytes`. Scales of each token need
        "pass_q".

        Parameters
        ----------
        plan : ShardedPlan
            Of this object's `plan`.
        num_heads, num_kv_heads, head_dim, v_head_dim : int
            Of the layer; v_head_dim is head_dim if it is not given.
        element_bytes : int
            Of queries, keys and values.
        shares_values : bool
            Whether values are a part of the keys, as in the latent cache of MLA.

        Returns
        -------
        ExchangeChoice
            Its name, the reason, and the bytes of each exchange.

        Raises
        ------
        TypeError
            For sizes that are no integers, and a flag that is no bool.
        ValueError
            For a plan of replicated pools, sizes below 1, and KV heads that do not divide the
            heads.
        """
        call = "ContextParallel.choose_exchange"
        if not isinstance(plan, ShardedPlan):
            raise ValueError(f"{call}: plan must be of sharded pools")
        sizes = LayerSizes(
            num_heads=at_least(1, num_heads, call, "num_heads"),
            num_kv_heads=at_least(1, num_kv_heads, call, "num_kv_heads"),
            head_dim=at_least(1, head_dim, call, "head_dim"),
            v_head_dim=at_least(
                1, head_dim if v_head_dim is None else v_head_dim, call, "v_head_dim"
            ),
            q_bytes=at_least(1, element_bytes, call, "element_bytes"),
            kv_bytes=element_bytes,
            shares_values=flag(shares_values, call, "shares_values"),
        )
        if sizes.num_heads % sizes.num_kv_heads:
            raise ValueError(
                f"{call}: num_heads must be a multiple of num_kv_heads, got {num_heads} and "
                f"{num_kv_heads}"
            )
        return choose(plan, sizes)

    def _check_decode_plan(self, call: str, plan: DecodePlan) -> None:
        if not isinstance(plan, DecodePlan):
            raise TypeError(
                f"ContextParallel.{call}: plan must be one of ContextParallel.plan_decode, got "
                f"{type(plan).__name__}"
            )
        of = (plan.cp_rank, plan.placement.shard_size)
        if of != (self.cp_rank, self.cp_size):
            raise ValueError(
                f"ContextParallel.{call}: plan must be of rank {self.cp_rank} of {self.cp_size}, "
                f"got rank {of[0]} of {of[1]}"
            )
