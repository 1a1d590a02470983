# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.decode_sparse`: queries that every rank has, over the keys of all ranks."""

from __future__ import annotations

import numpy as np
import torch

from ...sparse.sparse_mla import flash_mla_sparse_fwd
from ..layers.partials import merged_columns
from ..plans.sharded_plan import DecodePlan
from ..transport.exchange import RowExchange
from .inputs import SparseInputs
from .selection import (
    LocalIndex,
    all_positions,
    best_positions,
    candidate_width,
    rows_of_rank,
)

_CALL = "decode_sparse"


def decode(
    exchange: RowExchange, plan: DecodePlan, inputs: SparseInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all rows, and their LSE: the same bits on every rank."""
    shares, request = plan.batch.shares, plan.batch.rows.request
    visible = plan.batch.visible_keys
    positions = all_positions(visible, inputs.topk)
    searching = np.flatnonzero(visible > inputs.topk)
    if len(searching):
        positions[torch.from_numpy(searching)] = _search(exchange, plan, inputs, searching)
    out, _, lse = flash_mla_sparse_fwd(
        inputs.q,
        inputs.kv,
        rows_of_rank(shares, exchange.rank, request, positions),
        inputs.sm_scale,
        inputs.d_v,
    )
    num_rows = [plan.num_tokens] * exchange.size
    outs, lses = exchange.all_rows(_CALL, num_rows, [out.flatten(1), lse])
    return merged_columns(outs, lses, exchange.size, inputs.attn_sink)


def _search(
    exchange: RowExchange, plan: DecodePlan, inputs: SparseInputs, rows: np.ndarray
) -> torch.Tensor:
    """The positions that rows select that see more than topk keys."""
    shares, chosen = plan.batch.shares, torch.from_numpy(rows)
    request, visible = plan.batch.rows.request[rows], plan.batch.visible_keys[rows]
    width = candidate_width(shares, exchange.size, request, visible, inputs.topk)
    found = LocalIndex(inputs, shares, exchange.rank).candidates(
        inputs.index_q[chosen],
        inputs.weights[chosen],
        request,
        visible,
        width,
    )
    (of_ranks,) = exchange.all_rows(_CALL, [len(rows)] * exchange.size, [found])
    candidates = of_ranks.unflatten(0, (exchange.size, len(rows)))
    return best_positions(candidates.transpose(0, 1).flatten(1), inputs.topk)
