# SPDX-License-Identifier: Apache-2.0
"""Two-level USP exchange: a row of the mesh splits heads, and keys travel between rows.

Within its row, a rank takes some heads of the row's queries and keys, as in "all_to_all". The ranks
of a column, which have the same heads, pass these keys round a ring, as in "ring". Each row of the
mesh gives one partial result, and they merge in row order. A mesh with one column has the bits of
"ring"; a mesh with one row, without sinks, the bits of "all_to_all". Scratch of a rank: three
blocks with the keys and values of a row in its KV heads, queries and results of its heads for the
row, and a partial result of these for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ... import _core
from ..plans.key_shares import Array
from ..plans.mesh import Place, place_of
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from .all_to_all import begin_swap
from .layer import RankLayer
from .partials import ShardInputs, State
from .ring import Blocks, Ring, block_tensors
from .rows import put_rows


def attend(layer: RankLayer[ShardedPlan]) -> State:
    """Return attention and LSE of this rank's rows."""
    exchange, plan, inputs = layer.exchange, layer.plan, layer.inputs
    assert plan.mesh is not None  # `ContextParallel` refuses the exchange without a mesh
    place = place_of(plan.mesh, exchange.rank)
    shares = _core.share_heads(inputs.q.shape[1], inputs.k.shape[1], len(place.row))
    mine = shares[place.column]
    num_rows = [plan.rows_per_rank[rank] for rank in place.row]
    q = inputs.q.new_empty(sum(num_rows), mine.num_heads, inputs.q.shape[2])
    sends = [inputs.q[:, share.q].contiguous() for share in shares]
    _swap(exchange, place, sends, q.split(num_rows))
    ring = _RowRing(layer, place, shares, q)
    state = ring.attend() if mine.num_heads else ring.nothing()
    results = []
    for of_row in (state.out, state.lse[..., None]):
        received = [
            of_row.new_empty(plan.num_local_rows, share.num_heads, of_row.shape[2])
            for share in shares
        ]
        _swap(exchange, place, of_row.split(num_rows), received)
        results.append(torch.cat(received, dim=1))
    return State(results[0], results[1].squeeze(-1))


class _RowRing(Ring):
    """Ring of keys of mesh rows, for queries of a whole row in some heads."""

    def __init__(
        self,
        layer: RankLayer[ShardedPlan],
        place: Place,
        shares: Sequence[_core.HeadShare],
        q: torch.Tensor,
    ) -> None:
        inputs = layer.inputs
        self._place = place
        row_of = [place_of(place.mesh, rank).ring for rank in range(layer.exchange.size)]
        mine = shares[place.column]
        kv = mine.kv
        rope, options = inputs.k_rope, inputs.options
        own = replace(
            inputs, q=q, k=inputs.k[:, kv], v=inputs.v[:, kv],
            k_rope=None if rope is None else rope[:, kv], options=options.of_heads(kv, mine.q),
        )  # fmt: skip
        super().__init__(replace(layer, inputs=own, new=None), tuple(row_of))
        self.groups = self.size
        self._keys = self._keys_of_row(inputs, shares)

    def nothing(self) -> State:
        """Return the empty result of a rank without heads."""
        q, dim = self.inputs.q, self.inputs.v.shape[2]
        lse = q.new_empty(len(q), 0, dtype=torch.float32)
        return State(q.new_empty(len(q), 0, dim), lse)

    def own_block(self, heads: slice) -> torch.Tensor:
        """Return some of this rank's heads of its row's keys, as bytes; called once."""
        block = torch.empty(self.block_bytes(0, heads), dtype=torch.uint8, device="cpu")
        parts = block_tensors(block, self.inputs, self.pages[self.own], heads.stop - heads.start)
        for part, keys in zip(parts, self._keys, strict=True):
            part.view(torch.uint8).copy_(keys[:, heads].view(torch.uint8))
        if heads.stop == self.inputs.k.shape[1]:
            self._keys = []
        return block

    def messages(self, block: torch.Tensor, following: torch.Tensor) -> tuple[Blocks, Blocks]:
        """Send to the next rank with the same heads, and receive from the previous one."""
        return {self._place.neighbour(1): block}, {self._place.neighbour(-1): following}

    def rows(self) -> Array:
        """Return the row indices of all ranks in this row of the mesh."""
        begins = np.cumsum((0, *self.plan.rows_per_rank))
        return np.concatenate([np.arange(begins[r], begins[r + 1]) for r in self._place.row])

    def _keys_of_row(
        self, inputs: ShardInputs, shares: Sequence[_core.HeadShare]
    ) -> list[torch.Tensor]:
        """Return its row's keys and values in this rank's KV heads, in pages of a block."""
        place, pages = self._place, self.pages[self.own]
        of_ranks = [self.plan.batch.shares.local_keys(rank) for rank in place.row]
        own = torch.from_numpy(of_ranks[place.column].row)
        sends = [inputs.take(own, share.kv) for share in shares]
        slots = [
            pages.indptr[keys.request] * pages.page_size
            + self.shares.count_below(self.own, keys.request, keys.position)
            for keys in of_ranks
        ]
        wholes = []
        for i, sent in enumerate(sends[place.column]):
            num_bytes = sent.shape[2] * sent.element_size()
            shape = len(pages.ids) * pages.page_size, sent.shape[1], num_bytes
            whole = sent.new_zeros(shape, dtype=torch.uint8).view(sent.dtype)
            received = whole.new_empty(sum(map(len, slots)), *whole.shape[1:])
            parts = received.split([len(x) for x in slots])
            _swap(self.exchange, place, [x[i] for x in sends], parts)
            put_rows([whole], np.concatenate(slots), [received])
            wholes.append(whole)
        return wholes


def _swap(
    exchange: RowExchange,
    place: Place,
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
) -> None:
    """Send each rank of this rank's row its tensor, and receive one of each."""
    by_rank = [dict(zip(place.row, tensors, strict=True)) for tensors in (sends, receives)]
    exchange.finish(begin_swap(exchange, *by_rank))
