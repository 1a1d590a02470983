# SPDX-License-Identifier: Apache-2.0
"""Queries travel, keys stay: every rank attends with all queries to the keys that it holds.

Scratch of a rank: the queries of all ranks and their partial results, and the partial results of
its own rows from each rank, so about ``2 * num_tokens * num_heads * (head_dim + v_head_dim)``
elements whatever the length of the context.
"""

from __future__ import annotations

import torch

from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from .partials import ShardInputs, attend_part, merged_columns


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's rows, and their LSE.

    Partial results are merged in rank order, so the bits do not depend on which of them arrives
    first.
    """
    q, options = inputs.q, inputs.options
    (rows,) = exchange.all_rows("attend", plan.rows_per_rank, [q.flatten(1)])
    everything = slice(0, plan.num_tokens)
    calls = plan.batch.calls(
        exchange.rank, everything, causal=options.causal, window=options.window
    )
    queries = rows.unflatten(1, q.shape[1:])
    out, lse = attend_part(calls, queries, inputs.k, inputs.v, options, inputs.k_rope)
    indices = torch.arange(plan.num_tokens).split(list(plan.rows_per_rank))
    num_rows = [len(q)] * exchange.size
    outs, lses = exchange.routed_rows("attend", [out.flatten(1), lse], indices, num_rows)
    return merged_columns(outs, lses, exchange.size, options.sinks)
