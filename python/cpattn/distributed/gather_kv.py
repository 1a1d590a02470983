# SPDX-License-Identifier: Apache-2.0
"""Keys travel to everyone: each rank collects the whole context, and attends as if it held it.

The bits are those of a pool that holds everything. KV heads go in groups, as many at a time as fit
into `max_scratch_bytes`, one at least. Scratch of a rank: the keys and values of these heads for
the whole context, twice, as they arrive and in their places.
"""

from __future__ import annotations

import torch

from ..context_parallel.attention import do_cp_attn_fia
from .exchange import RowExchange
from .key_scratch import key_scratch
from .partials import ShardInputs, head_scale
from .sharded_plan import ShardedPlan


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's rows, and their LSE."""
    num_kv_heads = inputs.k.shape[1]
    at_once = heads_at_once(plan, inputs)
    results = [
        _attend_heads(exchange, plan, inputs, slice(head, min(head + at_once, num_kv_heads)))
        for head in range(0, num_kv_heads, at_once)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def heads_at_once(plan: ShardedPlan, inputs: ShardInputs) -> int:
    """The KV heads that a round gathers."""
    num_slots = len(plan.batch.shares.request) * plan.batch.shares.run
    bytes_of_head = 2 * num_slots * sum(inputs.kv_dims) * inputs.k.element_size()
    fitting = plan.max_scratch_bytes // max(bytes_of_head, 1)
    return min(max(fitting, 1), inputs.k.shape[1])


def _attend_heads(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query heads that read some of the KV heads."""
    options = inputs.options
    scratch = key_scratch(plan, options.window)
    own = inputs.take(scratch.sent_rows[exchange.rank], heads)
    received = exchange.all_rows("attend", scratch.counts, [rows.flatten(1) for rows in own])
    num_kv_heads = heads.stop - heads.start
    places = scratch.filled([rows.unflatten(1, (num_kv_heads, -1)) for rows in received])
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q_heads = slice(heads.start * group, heads.stop * group)
    q = inputs.q[:, q_heads]
    padded = q.new_zeros(plan.num_physical_rows, *q.shape[1:])
    padded[: len(q)] = q
    out, lse = do_cp_attn_fia(
        padded.flatten(1),
        places[0],
        None if inputs.shares_values else places[1],
        plan.metadata,
        block_tables=scratch.block_tables,
        page_size=plan.page_size,
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        scale=options.scale,
        causal=options.causal,
        window=options.window,
        softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks[q_heads].contiguous(),
        packed_custom_mask=plan.packed_custom_mask,
        v_head_dim=inputs.v.shape[-1] if inputs.shares_values else None,
        k_scale=head_scale(options.k_scale, heads),
        v_scale=head_scale(options.v_scale, heads),
        kv_dtype=options.kv_dtype,
        return_lse=True,
    )
    return out.unflatten(1, (q.shape[1], -1))[: len(q)], lse[: len(q)]
