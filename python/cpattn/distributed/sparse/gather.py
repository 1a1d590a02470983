# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with traveling keys: index keys to all ranks, latents to rows that select them.

A rank selects for its own rows among the index keys of all ranks, requests the latents from the
others (a bit for each key of the batch), and attends to them. The bits are those of pools that hold
all keys. Scratch of a rank: the index keys of the batch, twice, and the latents that its rows
select, once for all rows. Tokens go in rounds if these might exceed `max_scratch_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...sparse.indexer import indexer_topk
from ...sparse.sparse_mla import flash_mla_sparse_fwd
from ..layers.rows import put_rows
from ..plans.key_shares import Array
from ..plans.sharded_plan import ShardedBatch, ShardedPlan
from ..transport.exchange import RowExchange
from .inputs import SparseInputs
from .selection import all_positions

_CALL = "attend_sparse"


@dataclass(frozen=True)
class AllKeys:
    """Keys of a batch in two orders: request after request, and rank after rank."""

    begin: Array  # of each request, in request order
    place: Array  # place in request order of each key in rank order
    first: Array  # of each rank, in rank order; then the number of keys
    rows: list[Array]  # of each rank's keys in its pool

    def of_rank(self, rank: int) -> slice:
        """Return the range of a rank's keys in rank order."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    @property
    def counts(self) -> list[int]:
        """Number of keys that each rank holds."""
        return [len(rows) for rows in self.rows]


def all_keys(batch: ShardedBatch, size: int) -> AllKeys:
    """Return the keys of a batch, made once for all layers."""

    def make() -> AllKeys:
        begin = np.cumsum(batch.shares.kv_lens) - batch.shares.kv_lens
        keys = [batch.shares.local_keys(rank) for rank in range(size)]
        place = np.concatenate([begin[k.request] + k.position for k in keys])
        first = np.append(0, np.cumsum([len(k.row) for k in keys]))
        return AllKeys(begin, place, first, [k.row for k in keys])

    return batch.once("all keys", make)


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: SparseInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and LSE of this rank's rows."""
    keys = all_keys(plan.batch, exchange.size)
    visible = plan.batch.visible_keys
    own_visible = visible[plan.local_rows]
    begin = keys.begin[plan.batch.rows.request[plan.local_rows]]
    if (visible > inputs.topk).any():
        positions = _select(exchange, keys, inputs, begin, own_visible)
    else:
        positions = all_positions(own_visible, inputs.topk)
    out = inputs.q.new_empty(*inputs.q.shape[:2], inputs.d_v)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)
    rounds = _num_rounds(plan, inputs, len(keys.place))
    for i in range(rounds):
        part = slice(len(out) * i // rounds, len(out) * (i + 1) // rounds)
        places = torch.from_numpy(begin[part])[:, None] + positions[part]
        places.masked_fill_(positions[part] < 0, -1)
        out[part], lse[part] = _attend(exchange, keys, inputs, inputs.q[part], places)
    return out, lse


def _num_rounds(plan: ShardedPlan, inputs: SparseInputs, num_keys: int) -> int:
    """Return the number of rounds, the same on all ranks, at most one for each row."""
    row_bytes = inputs.latents.shape[1]
    most = max(plan.rows_per_rank)
    if num_keys * row_bytes <= plan.max_scratch_bytes:
        return min(most, 1)
    return min(most, -(-most * inputs.topk * row_bytes // plan.max_scratch_bytes))


def _select(
    exchange: RowExchange, keys: AllKeys, inputs: SparseInputs, begin: Array, visible: Array
) -> torch.Tensor:
    """Return the positions [rows, topk] of the best keys of each row."""
    codes, scale = inputs.take_index(torch.from_numpy(keys.rows[exchange.rank]))
    received = exchange.all_rows(_CALL, keys.counts, [codes] if scale is None else [codes, scale])
    by_request = [x.new_empty(x.shape) for x in received]
    put_rows(by_request, keys.place, received)
    return indexer_topk(
        inputs.index_q, by_request[0], inputs.weights, begin, begin + visible, topk=inputs.topk,
        k_scale=None if scale is None else by_request[1],
    )  # fmt: skip


def _attend(
    exchange: RowExchange,
    keys: AllKeys,
    inputs: SparseInputs,
    q: torch.Tensor,
    places: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch keys at `places` (in request order) from their ranks, and attend to them."""
    wanted = _wanted(exchange, keys, places)
    mine = keys.of_rank(exchange.rank)
    rows_for = [torch.from_numpy(keys.rows[exchange.rank][bits[mine]]) for bits in wanted]
    own = wanted[exchange.rank]
    rows_from = [int(own[keys.of_rank(rank)].sum()) for rank in range(exchange.size)]
    (latents,) = exchange.routed_rows(_CALL, [inputs.latents], rows_for, rows_from)
    where = places.new_full((len(keys.place) + 1,), -1, dtype=torch.int32)  # the last one of no key
    where[torch.from_numpy(keys.place[own])] = torch.arange(
        len(latents), dtype=torch.int32, device="cpu"
    )
    out, _, lse = flash_mla_sparse_fwd(
        q, latents.view(inputs.kv.dtype)[:, None], where[places], inputs.sm_scale, inputs.d_v,
        inputs.attn_sink,
    )  # fmt: skip
    return out, lse


def _wanted(exchange: RowExchange, keys: AllKeys, places: torch.Tensor) -> NDArray[np.bool_]:
    """Tell for each rank and key, in rank order, whether the rank wants it: [size, num_keys]."""
    wants = np.zeros(len(keys.place) + 1, dtype=bool)
    wants[places.numpy()] = True
    bits = torch.from_numpy(np.packbits(wants[keys.place]))[None]
    (of_ranks,) = exchange.all_rows(_CALL, [1] * exchange.size, [bits])
    return np.unpackbits(of_ranks.numpy(), axis=1, count=len(keys.place)).astype(bool)
