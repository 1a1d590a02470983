# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.decode_sparse`: queries on every rank, over the keys of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..._arguments import flag
from ...sparse.sparse_mla import flash_mla_sparse_fwd
from ..layers.decode import check_rows
from ..layers.partials import merged_columns
from ..plans.sharded_plan import DecodePlan, check_rank
from ..transport.exchange import RowExchange
from ..transport.terms import NO_TERMS
from .inputs import SparseInputs, checked_sparse_inputs, refuse_mask
from .selection import LocalIndex, all_positions, best_positions, candidate_width, rows_of_rank

_CALL = "decode_sparse"


def decode_sparse(
    exchange: RowExchange,
    plan: DecodePlan,
    q: torch.Tensor,
    *tensors: torch.Tensor,
    return_lse: bool,
    **options: Any,
) -> Any:
    """Run ContextParallel.decode_sparse."""
    terms: dict[str, int] = {}
    with exchange.agreement(_CALL, getattr(plan, "terms", NO_TERMS), terms) as parts:
        check_rank(_CALL, exchange, plan, DecodePlan)
        refuse_mask(_CALL, plan.batch.mask)
        return_lse = flag(return_lse, f"ContextParallel.{_CALL}", "return_lse")
        inputs = checked_sparse_inputs(
            _CALL, plan.num_tokens, plan.page_size, q, *tensors, **options
        )
        check_rows(_CALL, "q", q, plan)
        plan.batch.check_pool(_CALL, exchange.rank, inputs.num_slots)
        parts += [inputs.q.flatten(1), inputs.index_q.flatten(1), inputs.weights]
        terms["options"] = inputs.digest()
    with exchange.without_return():
        result = decode(exchange, plan, inputs)
    return result if return_lse else result[0]


def decode(
    exchange: RowExchange, plan: DecodePlan, inputs: SparseInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and LSE of all rows, with the same bits on every rank."""
    shares, request = plan.batch.shares, plan.batch.rows.request
    visible = plan.batch.visible_keys
    positions = all_positions(visible, inputs.topk)
    searching = np.flatnonzero(visible > inputs.topk)
    if len(searching):
        positions[torch.from_numpy(searching)] = _search(exchange, plan, inputs, searching)
    out, _, lse = flash_mla_sparse_fwd(
        inputs.q, inputs.kv, rows_of_rank(shares, exchange.rank, request, positions),
        inputs.sm_scale, inputs.d_v,
    )  # fmt: skip
    num_rows = [plan.num_tokens] * exchange.size
    outs, lses = exchange.all_rows(_CALL, num_rows, [out.flatten(1), lse])
    return merged_columns(outs, lses, exchange.size, inputs.attn_sink)


def _search(
    exchange: RowExchange, plan: DecodePlan, inputs: SparseInputs, rows: np.ndarray
) -> torch.Tensor:
    """Return the selected positions of rows that see more than topk keys."""
    shares, chosen = plan.batch.shares, torch.from_numpy(rows)
    request, visible = plan.batch.rows.request[rows], plan.batch.visible_keys[rows]
    width = candidate_width(shares, exchange.size, request, visible, inputs.topk)
    found = LocalIndex(inputs, shares, exchange.rank).candidates(
        inputs.index_q[chosen], inputs.weights[chosen], request, visible, width
    )
    (of_ranks,) = exchange.all_rows(_CALL, [len(rows)] * exchange.size, [found])
    candidates = of_ranks.unflatten(0, (exchange.size, len(rows)))
    return best_positions(candidates.transpose(0, 1).flatten(1), inputs.topk)
