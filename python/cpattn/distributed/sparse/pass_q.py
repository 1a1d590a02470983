# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with traveling queries: every rank scores and attends to the keys it holds.

Indexer queries go to all ranks, and each rank returns its best candidates to the rows. The rows
send their selection and attention queries to all ranks, and merge the returned partial results in
rank order. Rows that see at most `topk` keys select all of them without the indexer.

Scratch of a rank, for all tokens: both queries, 8 * topk bytes of candidates, the selected keys and
their places, and partial results, twice. Tokens go in rounds that keep this within
`max_scratch_bytes`. A copy of the rank's index keys of the batch comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...sparse.sparse_mla import flash_mla_sparse_fwd
from ..layers.partials import merged_columns
from ..plans.key_shares import Array, KeyShares
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from .inputs import SparseInputs
from .selection import LocalIndex, all_positions, best_positions, candidate_width, rows_of_rank

_CALL = "attend_sparse"


@dataclass(frozen=True)
class Round:
    """Rows of all ranks, rank after rank, that travel at once."""

    own: slice  # of the rows of this rank
    counts: list[int]  # of each rank
    request: Array
    visible: Array  # number of keys that each row sees


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: SparseInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and LSE of this rank's rows."""
    shares = plan.batch.shares
    out = inputs.q.new_empty(*inputs.q.shape[:2], inputs.d_v)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)
    index = None
    for part in _rounds(plan, inputs):
        searching = part.visible > inputs.topk
        if searching.any() and index is None:
            index = LocalIndex(inputs, shares, exchange.rank)
        positions = all_positions(_own(part.visible, part, exchange.rank), inputs.topk)
        if index is not None and searching.any():
            found = _search(exchange, shares, inputs, index, part, searching)
            positions[torch.from_numpy(_own(searching, part, exchange.rank))] = found
        out[part.own], lse[part.own] = _attend(exchange, shares, inputs, part, positions)
    return out, lse


def scratch_of_row(inputs: SparseInputs) -> int:
    """Return the scratch bytes of a row, without index keys."""
    num_heads, head_dim = inputs.q.shape[1:]
    index_q = inputs.index_q.shape[1] * inputs.index_q.shape[2] * inputs.index_q.element_size()
    queries = index_q + num_heads * head_dim * inputs.q.element_size()
    results = num_heads * (inputs.d_v * inputs.q.element_size() + 4)
    return queries + inputs.topk * (8 + 4 + 8) + 2 * results


def _rounds(plan: ShardedPlan, inputs: SparseInputs) -> Iterator[Round]:
    """Divide rows into rounds that keep traveling bytes within max_scratch_bytes.

    Each round has a row of at least one rank. All ranks have the same number of rounds; in some
    rounds a rank may have no row.
    """
    rows, size = plan.batch.rows, np.array(plan.rows_per_rank)
    visible = plan.batch.visible_keys
    rounds = -(-plan.num_tokens * scratch_of_row(inputs) // plan.max_scratch_bytes)
    rounds = min(rounds, int(size.max()))
    first = np.cumsum(size) - size
    for i in range(rounds):
        begin, end = size * i // rounds, size * (i + 1) // rounds
        chosen = np.concatenate(
            [np.arange(*bounds) for bounds in zip(first + begin, first + end, strict=True)]
        )
        own = slice(int(begin[plan.cp_rank]), int(end[plan.cp_rank]))
        yield Round(own, (end - begin).tolist(), rows.request[chosen], visible[chosen])


def _own(values: NDArray[Any], part: Round, rank: int) -> NDArray[Any]:
    """Return the values of the rows of a rank."""
    begin = sum(part.counts[:rank])
    return values[begin : begin + part.counts[rank]]


def _search(
    exchange: RowExchange,
    shares: KeyShares,
    inputs: SparseInputs,
    index: LocalIndex,
    part: Round,
    searching: NDArray[np.bool_],
) -> torch.Tensor:
    """Return the selected positions of this rank's rows that see more than topk keys."""
    counts = [int(_own(searching, part, rank).sum()) for rank in range(exchange.size)]
    asking = torch.from_numpy(_own(searching, part, exchange.rank))
    rows = [x[part.own][asking] for x in (inputs.index_q.flatten(1), inputs.weights)]
    queries, weights = exchange.all_rows(_CALL, counts, rows)
    request, visible = part.request[searching], part.visible[searching]
    width = candidate_width(shares, exchange.size, request, visible, inputs.topk)
    found = index.candidates(
        queries.unflatten(1, inputs.index_q.shape[1:]), weights, request, visible, width
    )
    rows_for = list(torch.arange(len(found), device="cpu").split(counts))
    num_rows = counts[exchange.rank]
    (received,) = exchange.routed_rows(_CALL, [found], rows_for, [num_rows] * exchange.size)
    of_ranks = received.unflatten(0, (exchange.size, num_rows))
    return best_positions(of_ranks.transpose(0, 1).flatten(1), inputs.topk)


def _attend(
    exchange: RowExchange,
    shares: KeyShares,
    inputs: SparseInputs,
    part: Round,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with this rank's rows to their selected keys on all ranks."""
    rows = [positions, inputs.q[part.own].flatten(1)]
    selected, q = exchange.all_rows(_CALL, part.counts, rows)
    out, _, lse = flash_mla_sparse_fwd(
        q.unflatten(1, inputs.q.shape[1:]), inputs.kv,
        rows_of_rank(shares, exchange.rank, part.request, selected), inputs.sm_scale, inputs.d_v,
    )  # fmt: skip
    rows_for = list(torch.arange(len(out), device="cpu").split(part.counts))
    num_rows = [part.counts[exchange.rank]] * exchange.size
    outs, lses = exchange.routed_rows(_CALL, [out.flatten(1), lse], rows_for, num_rows)
    return merged_columns(outs, lses, exchange.size, inputs.attn_sink)
