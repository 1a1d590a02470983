# SPDX-License-Identifier: Apache-2.0
"""Heads are shared out: a rank attends with some heads of all rows, as in DeepSpeed's Ulysses.

Queries go to the ranks of their heads, keys and values to those that read them, outputs back to the
rows. The bits are those of a pool that holds everything. With fewer KV heads than ranks, several
ranks have the same one. Scratch of a rank: the whole context of its KV heads, twice, and the
queries and results of its heads.
"""

from __future__ import annotations

import numpy as np
import torch

from ..attention import paged_attention
from .exchange import RowExchange
from .heads import HeadShare, head_shares
from .key_scratch import key_scratch
from .partials import ShardInputs, head_scale
from .sharded_plan import ShardedPlan


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's rows, and their LSE."""
    shares = head_shares(inputs.q.shape[1], inputs.k.shape[1], exchange.size)
    mine = shares[exchange.rank]
    sends = [inputs.q[:, share.q].contiguous() for share in shares]
    q = sends[0].new_empty(plan.num_tokens, mine.num_heads, inputs.q.shape[2])
    _swap(exchange, sends, list(q.split(list(plan.rows_per_rank))))
    taken = _own_heads(exchange, plan, inputs, shares)
    tokens = plan.gathered_rows
    out_of_tokens, lse_of_tokens = _attend_tokens(plan, inputs, mine, q[tokens], taken)
    results = []
    for of_tokens in (out_of_tokens, lse_of_tokens[..., None]):
        rows = torch.empty_like(of_tokens)
        rows[tokens] = of_tokens
        received = [
            rows.new_empty(plan.num_local_rows, share.num_heads, rows.shape[2]) for share in shares
        ]
        _swap(exchange, list(rows.split(list(plan.rows_per_rank))), received)
        results.append(torch.cat(received, dim=1))
    return results[0], results[1].squeeze(-1)


def _own_heads(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs, shares: list[HeadShare]
) -> list[torch.Tensor]:
    """Keys and values of this rank's KV heads for the whole context, in the pages of scratch."""
    scratch = key_scratch(plan, inputs.options.window)
    rows = scratch.sent_rows[exchange.rank]
    mine = shares[exchange.rank]
    num_kv_heads = mine.kv.stop - mine.kv.start if mine.num_heads else 0
    received = [
        torch.empty(len(scratch.slots), num_kv_heads, dim, dtype=inputs.k.dtype)
        for dim in inputs.kv_dims
    ]
    sends = [inputs.take(rows, share.kv if share.num_heads else slice(0)) for share in shares]
    for i, whole in enumerate(received):
        _swap(exchange, [taken[i] for taken in sends], list(whole.split(scratch.counts)))
    return scratch.filled(received)


def _attend_tokens(
    plan: ShardedPlan,
    inputs: ShardInputs,
    mine: HeadShare,
    q: torch.Tensor,
    taken: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's heads of all tokens, in the order of the tokens."""
    options = inputs.options
    values = inputs.values_of(taken)
    if not mine.num_heads:
        return q.new_empty(len(q), 0, values.shape[2]), torch.empty(len(q), 0)
    request = plan.batch.rows.request
    q_lens = np.bincount(request, minlength=len(plan.block_tables))
    scalars = options.scalars()
    for name in ("k_scale", "v_scale"):
        scalars[name] = head_scale(scalars[name], mine.kv)
    return paged_attention(
        q,
        taken[0],
        values,
        q_lens=q_lens,
        kv_lens=q_lens + np.asarray(plan.metadata.prefix_lens),
        block_tables=key_scratch(plan, options.window).block_tables,
        page_size=plan.page_size,
        causal=options.causal,
        window=options.window,
        sinks=None if options.sinks is None else options.sinks[mine.q].contiguous(),
        packed_custom_mask=plan.packed_custom_mask,
        return_lse=True,
        **scalars,
    )


def _swap(exchange: RowExchange, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
    """Send each rank its tensor, and receive one of each; a rank's own is copied."""
    receives[exchange.rank].copy_(sends[exchange.rank])
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    exchange.blocks(
        "attend",
        {rank: sends[rank] for rank in others},
        {rank: receives[rank] for rank in others},
    )
