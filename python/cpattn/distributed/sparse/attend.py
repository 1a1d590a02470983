# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.attend_sparse` over sharded pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._arguments import flag
from ..layers.choice import choose_sparse
from ..layers.layer import check_out, filled_outputs
from ..plans.sharded_plan import ShardedPlan, check_rank
from ..transport.exchange import RowExchange
from ..transport.terms import digest
from . import gather as sparse_gather
from . import pass_q as sparse_pass_q
from .inputs import SparseInputs, checked_sparse_inputs, refuse_mask

_CALL = "attend_sparse"
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
STRATEGIES: dict[str, Attend] = {"pass_q": sparse_pass_q.attend, "gather": sparse_gather.attend}


def attend_sparse_shards(
    exchange: RowExchange,
    plan: ShardedPlan,
    q: torch.Tensor,
    *tensors: torch.Tensor,
    out: torch.Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """Run ContextParallel.attend_sparse."""
    terms: dict[str, int] = {}
    with exchange.agreement(_CALL, plan.terms, terms) as parts:
        check_rank(_CALL, exchange, plan)
        refuse_mask(_CALL, plan.packed_custom_mask)
        return_lse = flag(return_lse, f"ContextParallel.{_CALL}", "return_lse")
        inputs = checked_sparse_inputs(
            _CALL, plan.num_local_rows, plan.page_size, q, *tensors, **options
        )
        plan.batch.check_pool(_CALL, plan.cp_rank, inputs.num_slots)
        check_out(_CALL, q, out, inputs.d_v)
        parts += [inputs.q.flatten(1), inputs.index_q.flatten(1), inputs.weights]
        name = _exchange_of(plan, inputs)
        terms["exchange"] = digest(f"{name} {plan.max_scratch_bytes}".encode())
        terms["options"] = inputs.digest()
    with exchange.without_return():
        rows, rows_lse = STRATEGIES[name](exchange, plan, inputs)
    return filled_outputs(q, out, rows, rows_lse, return_lse)


def _exchange_of(plan: ShardedPlan, inputs: SparseInputs) -> str:
    if plan.exchange == "auto":
        return choose_sparse(plan, inputs.sizes()).exchange
    if plan.exchange not in STRATEGIES:
        raise ValueError(
            f"ContextParallel.{_CALL}: exchange must be auto or {' or '.join(STRATEGIES)} for "
            f"sparse attention, got {plan.exchange}"
        )
    return plan.exchange
