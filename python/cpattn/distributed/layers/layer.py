# SPDX-License-Identifier: Apache-2.0
"""Checked arguments of a rank to `ContextParallel.attend` when all ranks make the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..._arguments import flag
from ..plans.plan import ContextParallelPlan
from ..plans.sharded_plan import ShardedPlan, check_rank
from ..transport.exchange import RowExchange
from .partials import AttentionOptions, ShardInputs, checked_inputs
from .prefetch import Prefetch
from .rows import NewRows, check_written, plan_rows
from .sharded_write import shard_rows

PlanT = TypeVar("PlanT", bound=ContextParallelPlan)


@dataclass(frozen=True)
class LayerArguments:
    """Arguments of ``attend`` on a rank, without options and plan."""

    q_local: torch.Tensor
    k_cache: torch.Tensor  # or this rank's shards of the caches
    v_cache: torch.Tensor | None
    k_local: torch.Tensor | None
    v_local: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None
    v_head_dim: int | None
    out: torch.Tensor | None
    return_lse: bool

    def outputs(self, rows: torch.Tensor, rows_lse: torch.Tensor | None) -> Any:
        """Return the rows and their LSE in the form that ``attend`` returns."""
        return filled_outputs(self.q_local, self.out, rows, rows_lse, self.return_lse)


@dataclass(frozen=True)
class RankLayer(Generic[PlanT]):
    """Checked inputs of one layer on a rank, and the new rows that it writes."""

    exchange: RowExchange
    plan: PlanT
    inputs: ShardInputs
    new: NewRows | None  # rows to write during attention
    return_lse: bool
    prefetched: Prefetch | None = None

    @property
    def flops(self) -> int:
        """Number of multiplications and additions on a rank."""
        return self.inputs.flops(self.plan.num_pairs) // len(self.plan.rows_per_rank)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads in the rank's pools."""
        return self.inputs.k.shape[1]


def filled_outputs(
    q: torch.Tensor,
    out: torch.Tensor | None,
    rows: torch.Tensor,
    rows_lse: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """Return a row for each row of q: the given ones, then zeros with LSE -inf."""
    if out is None:
        out = q.new_empty(*q.shape[:2], rows.shape[2])
    out[: len(rows)], out[len(rows) :] = rows, 0
    if not return_lse or rows_lse is None:
        return out
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    lse[: len(rows)] = rows_lse
    return out, lse


def checked_layer(
    exchange: RowExchange, plan: PlanT, arguments: LayerArguments, options: AttentionOptions
) -> RankLayer[PlanT]:
    """Check all rules that one rank can check alone."""
    check_rank("attend", exchange, plan)
    check_padding(plan, causal=options.causal)
    return_lse = flag(arguments.return_lse, "ContextParallel.attend", "return_lse")
    q, q_rope = arguments.q_local, arguments.q_rope
    if len(q) < plan.num_local_rows:
        raise ValueError(
            f"ContextParallel.attend: q_local must have at least the {plan.num_local_rows} "
            f"rows of rank {plan.cp_rank}, got {len(q)}"
        )
    own = slice(0, plan.num_local_rows)
    caches = arguments.k_cache, arguments.v_cache
    inputs = checked_inputs(
        "attend", plan.tokens, options, q[own], *caches, arguments.v_head_dim,
        None if q_rope is None else q_rope[own], arguments.k_rope,
    )  # fmt: skip
    _check_pool(plan, inputs)
    check_out("attend", q, arguments.out, inputs.v.shape[-1])
    return RankLayer(exchange, plan, inputs, _new_rows(plan, arguments), return_lse)


def check_padding(plan: ContextParallelPlan, *, causal: bool) -> None:
    """Refuse padding tokens that other tokens would see."""
    if not causal and plan.num_padding_tokens and plan.packed_custom_mask is None:
        raise ValueError(
            "ContextParallel.attend: causal=False needs a mask, or a plan without padding "
            f"tokens, which the last request would see, got {plan.num_padding_tokens}"
        )


def _check_pool(plan: ContextParallelPlan, inputs: ShardInputs) -> None:
    if isinstance(plan, ShardedPlan):
        plan.batch.check_pool("attend", plan.cp_rank, inputs.num_slots)
        return
    num_slots, page_size = len(inputs.k), plan.page_size
    if num_slots % page_size or len(inputs.v) != num_slots:
        raise ValueError(
            f"ContextParallel.attend: k_cache and v_cache must have the same whole pages of "
            f"{page_size} slots, got {num_slots} and {len(inputs.v)} slots"
        )
    if plan.block_tables.size and (int(plan.block_tables.max()) + 1) * page_size > num_slots:
        raise ValueError(
            f"ContextParallel.attend: k_cache must have page {plan.block_tables.max()} of "
            f"block_tables, got {num_slots} slots of pages of {page_size}"
        )


def check_out(call: str, q: torch.Tensor, out: torch.Tensor | None, dim: int) -> None:
    """Refuse outputs without a row of `dim` elements in every head for each row of q."""
    if out is None:
        return
    shape = (*q.shape[:2], dim)
    if out.shape != shape or out.dtype != q.dtype:
        raise ValueError(
            f"ContextParallel.{call}: out must be {list(shape)} of {q.dtype}, got "
            f"{list(out.shape)} of {out.dtype}"
        )
    check_written(call, "out", out)
    if out.numel() and any(n > 1 and not step for n, step in zip(shape, out.stride(), strict=True)):
        raise ValueError(
            f"ContextParallel.{call}: out must not be a broadcast view, got strides "
            f"{list(out.stride())}"
        )


def _new_rows(plan: ContextParallelPlan, arguments: LayerArguments) -> NewRows | None:
    local = arguments.k_local, arguments.v_local
    caches = arguments.k_cache, arguments.v_cache
    if arguments.k_local is None:
        if arguments.v_local is not None:
            raise ValueError("ContextParallel.attend: v_local must come with k_local, got none")
        return None
    if arguments.k_rope is not None:
        raise ValueError(
            "ContextParallel.attend: k_local must be without k_rope; write_kv takes both"
        )
    if isinstance(plan, ShardedPlan):
        return shard_rows("attend", plan, local, caches)
    return plan_rows("attend", plan, local, caches)
