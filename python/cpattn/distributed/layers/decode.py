# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.decode`: queries on every rank, over the keys of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..._arguments import at_least, flag
from ..plans.sharded_plan import DecodePlan, check_rank
from ..transport.exchange import RowExchange
from ..transport.terms import NO_TERMS, digest
from .choice import choose_state_exchange
from .decode_states import OUT_HEADS, STATE_EXCHANGES, gather_queries, heads_of_ranks, merge_states
from .partials import AttentionOptions, ShardInputs, attend_part, checked_inputs
from .rows import check_tensor

_CALL = "ContextParallel.decode"


@dataclass(frozen=True)
class DecodeArguments:
    """Arguments of ``decode`` on a rank, without options and plan."""

    q: torch.Tensor
    k_shard: torch.Tensor
    v_shard: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None
    v_head_dim: int | None
    num_heads: int | None
    out_heads: str
    exchange: str
    return_lse: bool


def decode(
    exchange: RowExchange, plan: DecodePlan, arguments: DecodeArguments, options: AttentionOptions
) -> Any:
    """Run ContextParallel.decode."""
    q, q_rope, num_heads = arguments.q, arguments.q_rope, arguments.num_heads
    terms: dict[str, int] = {}
    with exchange.agreement("decode", getattr(plan, "terms", NO_TERMS), terms) as parts:
        check_rank("decode", exchange, plan, DecodePlan)
        return_lse = flag(arguments.return_lse, _CALL, "return_lse")
        queries, q_ropes = q, q_rope
        if num_heads is not None:
            queries = _all_heads(exchange, "q", q, num_heads)
            if q_rope is not None:
                q_ropes = _all_heads(exchange, "q_rope", q_rope, num_heads)
                check_rows("decode", "q_rope", q_rope, plan)
        inputs = checked_inputs(
            "decode", plan.batch.tokens, options, queries, arguments.k_shard, arguments.v_shard,
            arguments.v_head_dim, q_ropes, arguments.k_rope,
        )  # fmt: skip
        check_rows("decode", "q", q, plan)
        plan.batch.check_pool("decode", exchange.rank, inputs.num_slots)
        parts.append(inputs.q.flatten(1))
        name = _state_exchange(plan, inputs, arguments.exchange, arguments.out_heads)
        how = f"{name} {arguments.out_heads} {num_heads is None}"
        terms["exchange"] = digest(how.encode())
        terms["options"] = inputs.digest()
    queries, options, rows = inputs.q, inputs.options, slice(0, len(q))
    with exchange.without_return():
        if num_heads is not None:
            own = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
            queries = gather_queries(exchange, own, inputs.q.shape[1])
        call = plan.batch.call(exchange.rank, rows, causal=options.causal, window=options.window)
        positions = partial(plan.batch.positions, exchange.rank, rows)
        state = attend_part(call, queries, inputs.k, inputs.v, options, positions, inputs.k_rope)
        result = merge_states(exchange, state, options.sinks, name, arguments.out_heads)
    return result if return_lse else result[0]


def _all_heads(exchange: RowExchange, name: str, q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Check this rank's queries, and return zero rows of queries with all heads."""
    number = at_least(1, num_heads, _CALL, "num_heads")
    own = heads_of_ranks(number, exchange.size)[exchange.rank]
    if q.ndim != 3 or q.shape[1] != own.stop - own.start:
        raise ValueError(
            f"{_CALL}: {name} must be [num_tokens, {own.stop - own.start}, head_dim] of rank "
            f"{exchange.rank}, for {number} heads on {exchange.size} ranks, got shape "
            f"{list(q.shape)}"
        )
    check_tensor("decode", name, q)
    return q.new_empty(0, number, q.shape[2])


def _state_exchange(plan: DecodePlan, inputs: ShardInputs, exchange: str, out_heads: str) -> str:
    """Return the name of the exchange of partial results."""
    for argument, value, known in (
        ("exchange", exchange, ("auto", *STATE_EXCHANGES)),
        ("out_heads", out_heads, OUT_HEADS),
    ):
        if value not in known:
            raise ValueError(
                f"{_CALL}: {argument} must be one of {', '.join(known)}, got {value!r:.40}"
            )
    if exchange != "auto":
        return exchange
    return choose_state_exchange(plan, inputs.sizes(), out_heads).exchange


def check_rows(call: str, name: str, q: torch.Tensor, plan: DecodePlan) -> None:
    """Refuse a number of queries that differs from the plan's."""
    if len(q) != plan.num_tokens:
        raise ValueError(
            f"ContextParallel.{call}: {name} must have the {plan.num_tokens} rows of the plan, "
            f"got {len(q)}"
        )
