# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.attend` over KV pools of which each rank holds a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._arguments import flag, has
from ..kv import Placement
from . import all_to_all, gather_kv, pass_q, ring
from .choice import choose
from .exchange import RowExchange, digest
from .partials import AttentionOptions, ShardInputs, checked_inputs
from .sharded_plan import ShardedPlan

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]

STRATEGIES: dict[str, Attend] = {
    "pass_q": pass_q.attend,
    "gather": gather_kv.attend,
    "ring": ring.attend,
    "all_to_all": all_to_all.attend,
}
EXCHANGES = ("auto", *STRATEGIES)
# Read the shard where it is, so that scales of tokens fit; the others read copies of keys.
_IN_PLACE = "pass_q"


def attend_shards(
    exchange: RowExchange,
    plan: ShardedPlan,
    q_local: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
    options: AttentionOptions,
    *,
    q_rope: torch.Tensor | None,
    k_rope: torch.Tensor | None,
    v_head_dim: int | None,
    out: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """See ContextParallel.attend."""
    terms: dict[str, int] = {}
    with exchange.agreement("attend", plan.terms, terms) as parts:
        _check_rank(exchange, plan)
        if not options.causal and plan.num_padding_tokens and plan.packed_custom_mask is None:
            raise ValueError(
                "ContextParallel.attend: causal=False needs a mask, or a plan without padding "
                f"tokens, which the last request would see, got {plan.num_padding_tokens}"
            )
        return_lse = flag(return_lse, "ContextParallel.attend", "return_lse")
        if len(q_local) < plan.num_local_rows:
            raise ValueError(
                f"ContextParallel.attend: q_local must have at least the {plan.num_local_rows} "
                f"rows of rank {plan.cp_rank}, got {len(q_local)}"
            )
        own = slice(0, plan.num_local_rows)
        inputs = checked_inputs(
            "attend", options, q_local[own], k_shard, v_shard, v_head_dim,
            None if q_rope is None else q_rope[own], k_rope,
        )  # fmt: skip
        plan.batch.check_pool("attend", plan.cp_rank, len(inputs.k))
        shape = (*q_local.shape[:2], inputs.v.shape[-1])
        if out is not None and (out.shape != shape or out.dtype != q_local.dtype):
            raise ValueError(
                f"ContextParallel.attend: out must be {list(shape)} of {q_local.dtype}, got "
                f"{list(out.shape)} of {out.dtype}"
            )
        parts.append(inputs.q.flatten(1))
        name = _exchange_of(plan, inputs)
        terms["exchange"] = digest(f"{name} {plan.max_scratch_bytes}".encode())
        terms["options"] = inputs.digest()
    rows, rows_lse = STRATEGIES[name](exchange, plan, inputs)
    out = q_local.new_empty(shape) if out is None else out
    out[own], out[len(rows) :] = rows, 0
    if not return_lse:
        return out
    lse = torch.full(shape[:2], -torch.inf)
    lse[own] = rows_lse
    return out, lse


def _exchange_of(plan: ShardedPlan, inputs: ShardInputs) -> str:
    """The name of the exchange for a layer; ValueError for one that cannot do it."""
    options = inputs.options
    scaled = any(getattr(x, "ndim", 0) == 2 for x in (options.k_scale, options.v_scale))
    name = plan.exchange
    if name == "auto":
        if scaled:
            return _IN_PLACE
        name = choose(plan, inputs.sizes(), in_place=inputs.k_rope is not None).exchange
    if scaled and name != _IN_PLACE:
        raise ValueError(
            f"ContextParallel.attend: k_scale and v_scale of each token need the exchange "
            f"{_IN_PLACE}, got {name}"
        )
    if name == _IN_PLACE and inputs.k_rope is not None:
        raise ValueError(
            f"ContextParallel.attend: k_rope must be a part of the keys for the exchange {name}"
        )
    return name


def check_placement(
    placement: Placement | None, exchange: str, cp_size: int, page_size: int
) -> None:
    """Refuse what `ContextParallel` cannot be made with."""
    if exchange not in EXCHANGES:
        raise ValueError(
            f"ContextParallel: exchange must be one of {', '.join(EXCHANGES)}, got {exchange!r}"
        )
    if placement is None:
        return
    missing = [
        name for name in ("shard_size", "owner_of", "local_index") if not has(placement, name)
    ]
    if missing:
        raise TypeError(
            f"ContextParallel: placement must have {', '.join(missing)}, got "
            f"{type(placement).__name__}"
        )
    if placement.shard_size != cp_size:
        raise ValueError(
            f"ContextParallel: placement must be over the {cp_size} ranks of the group, got "
            f"shard_size {placement.shard_size}"
        )
    if getattr(placement, "page_size", page_size) != page_size:
        raise ValueError(
            f"ContextParallel: placement must have the page_size {page_size}, got "
            f"{placement.page_size}"  # type: ignore[attr-defined]
        )


def _check_rank(exchange: RowExchange, plan: ShardedPlan) -> None:
    of = (plan.cp_rank, len(plan.rows_per_rank))
    if of != (exchange.rank, exchange.size):
        raise ValueError(
            f"ContextParallel.attend: plan must be of rank {exchange.rank} of {exchange.size}, "
            f"got rank {of[0]} of {of[1]}"
        )
