# SPDX-License-Identifier: Apache-2.0
"""Heads are shared out: a rank attends with some heads of all rows, as in DeepSpeed's Ulysses.

Queries go to the ranks of their heads, keys and values to those that read them, outputs back to the
rows. The bits are those of a pool that holds everything. With fewer KV heads than ranks, several
ranks have the same one. Scratch of a rank: the whole context of its KV heads, twice, and the
queries and results of its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...attention import paged_attention
from ..plans.heads import HeadShare, head_shares
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from .key_scratch import key_scratch
from .partials import ShardInputs, head_scale


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs, *, return_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of this rank's rows, and their LSE if it is wanted."""
    shares = head_shares(inputs.q.shape[1], inputs.k.shape[1], exchange.size)
    mine = shares[exchange.rank]
    sends = [inputs.q[:, share.q].contiguous() for share in shares]
    q = sends[0].new_empty(plan.num_tokens, mine.num_heads, inputs.q.shape[2])
    _swap(exchange, sends, q.split(list(plan.rows_per_rank)))
    taken = _own_heads(exchange, plan, inputs, shares)
    tokens = plan.gathered_rows
    of_tokens = _attend_tokens(plan, inputs, mine, q[tokens], taken, return_lse=return_lse)
    results = []
    for part in of_tokens:
        rows = torch.empty_like(part)
        rows[tokens] = part
        received = [
            rows.new_empty(plan.num_local_rows, share.num_heads, rows.shape[2]) for share in shares
        ]
        _swap(exchange, rows.split(list(plan.rows_per_rank)), received)
        results.append(torch.cat(received, dim=1))
    return results[0], results[1].squeeze(-1) if return_lse else None


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
        _swap(exchange, [taken[i] for taken in sends], whole.split(scratch.counts))
    return scratch.filled(received)


def _attend_tokens(
    plan: ShardedPlan,
    inputs: ShardInputs,
    mine: HeadShare,
    q: torch.Tensor,
    taken: list[torch.Tensor],
    *,
    return_lse: bool,
) -> list[torch.Tensor]:
    """This rank's heads of all tokens, in the order of the tokens; and their LSE [.., heads, 1]."""
    options = inputs.options
    values = inputs.values_of(taken)
    if not mine.num_heads:
        empty = [q.new_empty(len(q), 0, values.shape[2])]
        return [*empty, torch.empty(len(q), 0, 1)] if return_lse else empty
    request = plan.batch.rows.request
    q_lens = np.bincount(request, minlength=len(plan.block_tables))
    scalars = options.scalars()
    for name in ("k_scale", "v_scale"):
        scalars[name] = head_scale(scalars[name], mine.kv)
    result: Any = paged_attention(
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
        return_lse=return_lse,
        **scalars,
    )
    return [result[0], result[1][..., None]] if return_lse else [result]


def _swap(
    exchange: RowExchange, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> None:
    """Send each rank its tensor, and receive one of each."""
    swap(exchange, dict(enumerate(sends)), dict(enumerate(receives)))


def swap(
    exchange: RowExchange, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
) -> None:
    """Send some ranks a tensor each, and receive one of each; a rank's own is copied."""
    receives.pop(exchange.rank).copy_(sends.pop(exchange.rank))
    exchange.blocks("attend", sends, receives)
