# SPDX-License-Identifier: Apache-2.0
"""Keys travel round a ring: a rank attends to one share of them while the next is on its way.

Of a share some KV heads travel at a time: what has come is attended to, and passed on, while the
other heads are under way. New keys go to the ranks that keep them in the same way, before.

Partial results are merged in the order of the shares, whatever the order in which a rank has them,
so that a row has the same bits on every rank. Scratch of a rank: two shares of the keys and values,
and a partial result of its own rows for each share.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from ..plans.key_shares import KeyShares, LocalPages
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from ..transport.waiting import Posted
from .partials import ShardInputs, State, attend_part, merged, no_state
from .rounds import head_rounds, side_by_side
from .rows import NewRows
from .sharded_write import OwnerRoutes, Routed

_PAGE = 16  # of a share on its way, in which every request begins with a new page


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs, new: NewRows | None = None
) -> State:
    """Attention of this rank's rows, and their LSE; new keys are written, if they are given."""
    return _Ring(exchange, plan, inputs).attend(new)


class _Ring:
    """A layer whose shares of keys go round."""

    def __init__(self, exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs) -> None:
        self._exchange, self._plan, self._inputs = exchange, plan, inputs
        shares = range(exchange.size)
        self._schedule = ring_schedule(exchange.rank, exchange.size)
        self._pages = [ring_pages(plan.batch.shares, share) for share in shares]
        self._parts = [no_state(len(inputs.q), inputs.q, inputs.v) for _ in shares]

    def attend(self, new: NewRows | None) -> State:
        plan, inputs = self._plan, self._inputs
        rounds = _rounds(plan, inputs, new)
        coming = []
        routes = OwnerRoutes("attend", self._exchange, plan, new, inputs.k.shape[1])

        def attend_own(heads: slice, routed: Routed) -> None:
            routes.store(routed)
            block = _own_block(plan, inputs, self._pages[plan.cp_rank], heads)
            coming.append(self._passed_on(0, block, heads))
            self._attend(plan.cp_rank, block, heads)

        side_by_side(rounds, lambda heads, _: routes.begin(heads), attend_own)
        for step, share in enumerate(self._schedule[1:], 1):
            for i, heads in enumerate(rounds):
                block, posted = coming[i]
                self._exchange.finish(posted)
                coming[i] = self._passed_on(step, block, heads)
                self._attend(share, block, heads)
        return merged(self._parts, inputs.options.sinks)

    def _passed_on(
        self, step: int, block: torch.Tensor, heads: slice
    ) -> tuple[torch.Tensor, Posted]:
        """Send a block to the next rank, and receive that of the next step, which may be none."""
        rank, size = self._exchange.rank, self._exchange.size
        if step == size - 1:
            return block, Posted("attend")
        pages = self._pages[self._schedule[step + 1]]
        following = block.new_empty(block_bytes(self._inputs, pages, heads.stop - heads.start))
        posted = self._exchange.post(
            "attend", {(rank + 1) % size: block}, {(rank - 1) % size: following}
        )
        return following, posted

    def _attend(self, share: int, block: torch.Tensor, heads: slice) -> None:
        plan, inputs, pages = self._plan, self._inputs, self._pages[share]
        options = inputs.options
        calls = plan.batch.calls(
            share, plan.local_rows, causal=options.causal, window=options.window, pages=pages
        )
        taken = block_tensors(block, inputs, pages, heads.stop - heads.start)
        q_heads = inputs.q_heads(heads)
        out, lse = self._parts[share]
        attend_part(
            calls, inputs.q[:, q_heads], taken[0], inputs.values_of(taken),
            options.of_heads(heads), state=(out[:, q_heads], lse[:, q_heads]),
        )  # fmt: skip


def _rounds(plan: ShardedPlan, inputs: ShardInputs, new: NewRows | None) -> list[slice]:
    """The KV heads that travel at a time, the same on every rank."""
    num_kv_heads = inputs.k.shape[1]
    rows = sum(plan.kv_counts) - min(plan.kv_counts) + (0 if new is None else plan.num_tokens)
    flops = inputs.flops(plan.num_pairs) // len(plan.rows_per_rank)
    return head_rounds(num_kv_heads, rows * num_kv_heads * inputs.head_bytes, flops)


def ring_schedule(rank: int, size: int) -> list[int]:
    """Whose keys a rank has, step after step: its own, then those that its neighbour had."""
    return [(rank - step) % size for step in range(size)]


def ring_pages(shares: KeyShares, share: int) -> LocalPages:
    """Where the keys of a share are in a block of it."""
    counts = -(-shares.counts(share) // _PAGE)
    return LocalPages(_PAGE, np.append(0, np.cumsum(counts)), np.arange(counts.sum()))


def _own_block(
    plan: ShardedPlan, inputs: ShardInputs, pages: LocalPages, heads: slice
) -> torch.Tensor:
    """Some heads of the keys that this rank holds, then of their values, as bytes."""
    keys = plan.batch.shares.local_keys(plan.cp_rank)
    counts = plan.batch.shares.counts(plan.cp_rank)
    within = np.arange(len(keys.row)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.full(len(pages.ids) * _PAGE, keys.row[0] if len(keys.row) else 0)
    rows[pages.indptr[keys.request] * _PAGE + within] = keys.row
    taken = inputs.take(torch.from_numpy(rows), heads)
    return torch.cat([x.view(torch.uint8).flatten() for x in taken])


def _shapes(
    inputs: ShardInputs, pages: LocalPages, num_kv_heads: int
) -> list[tuple[int, int, int]]:
    return [(len(pages.ids) * _PAGE, num_kv_heads, dim) for dim in inputs.kv_dims]


def block_bytes(inputs: ShardInputs, pages: LocalPages, num_kv_heads: int) -> int:
    """Of a block with keys, and values, in so many heads."""
    sizes = [prod(shape) for shape in _shapes(inputs, pages, num_kv_heads)]
    return sum(sizes) * inputs.k.element_size()


def block_tensors(
    block: torch.Tensor, inputs: ShardInputs, pages: LocalPages, num_kv_heads: int
) -> list[torch.Tensor]:
    """The block as keys, and values unless they are a part of these."""
    shapes = _shapes(inputs, pages, num_kv_heads)
    parts = block.split([prod(shape) * inputs.k.element_size() for shape in shapes])
    return [
        part.view(inputs.k.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)
    ]
