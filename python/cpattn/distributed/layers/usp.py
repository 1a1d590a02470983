# SPDX-License-Identifier: Apache-2.0
"""Heads are shared out within a row of a mesh, and keys go round between rows: USP of two levels.

Within its row a rank takes some heads of the row's queries and keys, as by "all_to_all"; the ranks
of a column, which have the same heads, pass these keys round a ring, as by "ring". There is one
partial result for each row of the mesh, and they are merged in the order of the rows. A mesh of a
single column has the bits of "ring"; one of one row, without sinks, those of "all_to_all". Scratch
of a rank: two blocks with the keys and values of a row in its KV heads, queries and results of its
heads for the row, and a partial result of them for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..plans.heads import HeadShare, head_shares
from ..plans.key_shares import KeyShares, LocalPages
from ..plans.mesh import Mesh, Place, place_of
from ..plans.sequence_calls import Rows, SequenceCall, Visibility, sequence_calls
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from .all_to_all import begin_swap
from .partials import AttentionOptions, ShardInputs, attend_part, head_scale, merged
from .ring import block_bytes, block_tensors, ring_pages, ring_schedule
from .rows import put_rows

State = tuple[torch.Tensor, torch.Tensor]


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's rows, and their LSE."""
    assert plan.mesh is not None  # `ContextParallel` refuses the exchange without
    place = place_of(plan.mesh, exchange.rank)
    shares = head_shares(inputs.q.shape[1], inputs.k.shape[1], len(place.row))
    mine = shares[place.column]
    num_rows = [plan.rows_per_rank[rank] for rank in place.row]
    q = inputs.q.new_empty(sum(num_rows), mine.num_heads, inputs.q.shape[2])
    sends = [inputs.q[:, share.q].contiguous() for share in shares]
    _swap(exchange, place, sends, q.split(num_rows))
    by_row = _keys_by_row(plan, place.mesh)
    block = _row_block(exchange, plan, inputs, place, by_row, shares)
    state = _round_the_ring(exchange, plan, inputs, place, by_row, q, block, mine)
    results = []
    for of_row in (state[0], state[1][..., None]):
        received = [
            of_row.new_empty(plan.num_local_rows, share.num_heads, of_row.shape[2])
            for share in shares
        ]
        _swap(exchange, place, of_row.split(num_rows), received)
        results.append(torch.cat(received, dim=1))
    return results[0], results[1].squeeze(-1)


def _round_the_ring(
    exchange: RowExchange,
    plan: ShardedPlan,
    inputs: ShardInputs,
    place: Place,
    by_row: KeyShares,
    q: torch.Tensor,
    block: torch.Tensor,
    mine: HeadShare,
) -> State:
    """This rank's heads of the queries of its row, over the keys of one row after another."""
    options, size = _options_of(inputs.options, mine), place.ring_size
    num_kv_heads = _num_kv_heads(mine)
    pages = [ring_pages(by_row, share) for share in range(size)]
    parts: dict[int, State] = {}
    for step, share in enumerate(ring_schedule(place.ring, size)):
        last = step == size - 1
        coming = pages[(share - 1) % size]
        following = block.new_empty(0 if last else block_bytes(inputs, coming, num_kv_heads))
        posted = exchange.post(
            "attend",
            {} if last else {place.neighbour(1): block},
            {} if last else {place.neighbour(-1): following},
        )
        if mine.num_heads:
            taken = block_tensors(block, inputs, pages[share], num_kv_heads)
            calls = _calls(plan, place, by_row, share, pages[share], options)
            parts[share] = attend_part(calls, q, taken[0], inputs.values_of(taken), options)
        exchange.finish(posted)
        block = following
    if not mine.num_heads:
        return q.new_empty(len(q), 0, inputs.v.shape[2]), torch.empty(len(q), 0)
    return merged([parts[share] for share in range(size)], options.sinks)


def _row_block(
    exchange: RowExchange,
    plan: ShardedPlan,
    inputs: ShardInputs,
    place: Place,
    by_row: KeyShares,
    shares: Sequence[HeadShare],
) -> torch.Tensor:
    """Keys, then values, in this rank's KV heads of what its row holds: a block as bytes."""
    num_kv_heads = _num_kv_heads(shares[place.column])
    pages = ring_pages(by_row, place.ring)
    of_ranks = [plan.batch.shares.local_keys(rank) for rank in place.row]
    own = torch.from_numpy(of_ranks[place.column].row)
    sends = [inputs.take(own, share.kv if share.num_heads else slice(0)) for share in shares]
    slots = [
        pages.indptr[keys.request] * pages.page_size
        + by_row.count_below(place.ring, keys.request, keys.position)
        for keys in of_ranks
    ]
    block = torch.zeros(block_bytes(inputs, pages, num_kv_heads), dtype=torch.uint8)
    for i, whole in enumerate(block_tensors(block, inputs, pages, num_kv_heads)):
        received = whole.new_empty(sum(map(len, slots)), *whole.shape[1:])
        _swap(exchange, place, [x[i] for x in sends], received.split([len(x) for x in slots]))
        put_rows(whole, torch.from_numpy(np.concatenate(slots)), received)
    return block


def _calls(
    plan: ShardedPlan,
    place: Place,
    by_row: KeyShares,
    share: int,
    pages: LocalPages,
    options: AttentionOptions,
) -> list[SequenceCall]:
    """How the queries of this rank's row see the keys of another, made once for all layers."""
    memo, key = plan.batch.memo, ("usp", place.ring, share, options.causal, options.window)
    if key not in memo:
        begins = np.cumsum((0, *plan.rows_per_rank))
        own = np.concatenate([np.arange(begins[r], begins[r + 1]) for r in place.row])
        rows = Rows(plan.batch.rows.request[own], plan.batch.rows.position[own])
        visibility = Visibility(options.causal, options.window, plan.batch.mask)
        memo[key] = sequence_calls(by_row, share, pages, rows, visibility)
    calls: list[SequenceCall] = memo[key]
    return calls


def _keys_by_row(plan: ShardedPlan, mesh: Mesh) -> KeyShares:
    """Which row of the mesh has which keys; made once for all layers."""
    memo = plan.batch.memo
    if "keys by row" not in memo:
        rows = [place_of(mesh, rank).ring for rank in range(len(plan.rows_per_rank))]
        memo["keys by row"] = plan.batch.shares.of_groups(np.array(rows))
    shares: KeyShares = memo["keys by row"]
    return shares


def _options_of(options: AttentionOptions, mine: HeadShare) -> AttentionOptions:
    """Those of a rank's heads."""
    return replace(
        options,
        sinks=None if options.sinks is None else options.sinks[mine.q],
        k_scale=head_scale(options.k_scale, mine.kv),
        v_scale=head_scale(options.v_scale, mine.kv),
    )


def _num_kv_heads(share: HeadShare) -> int:
    return share.kv.stop - share.kv.start if share.num_heads else 0


def _swap(
    exchange: RowExchange,
    place: Place,
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
) -> None:
    """Send each rank of this rank's row its tensor, and receive one of each."""
    by_rank = [dict(zip(place.row, tensors, strict=True)) for tensors in (sends, receives)]
    exchange.finish(begin_swap(exchange, *by_rank))
