# SPDX-License-Identifier: Apache-2.0
"""Ring exchange of keys: a rank attends to one share of the keys while the next share arrives.

Some KV heads of a share travel at a time: a rank attends to those that have arrived and passes them
on while other heads travel. New keys first go to the ranks that keep them, in the same way.

If ranks share memory, a share is the keys of a host: its ranks write them into scratch of the host,
pass parts on to as many ranks of the next host, and all read the parts that arrive.

Partial results merge in the order of the shares, for any order of arrival, so a row has the same
bits on every rank. Scratch of a rank or host: two shares of the keys and values; of a rank also a
partial result of its own rows for each share.
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import torch

from ... import _core
from ..plans.key_shares import Array, KeyShares
from ..plans.sequence_call import Positions, SequenceCall, Visibility, sequence_call
from ..plans.sharded_plan import ShardedPlan
from ..plans.tokens import Rows
from ..transport.host import HostGroup
from ..transport.shared_memory import shared_scratch
from ..transport.waiting import Posted
from .layer import RankLayer
from .partials import ShardInputs, State, attend_part, merged, no_state
from .rounds import head_rounds, side_by_side
from .rows import put_rows
from .sharded_write import OwnerRoutes, Routed

_PAGE = 16  # of a traveling share, in which every request begins with a new page
_ALIGNMENT = 64  # bytes, of the heads of a share in scratch
Blocks = dict[int, torch.Tensor]  # by rank


def attend(layer: RankLayer[ShardedPlan]) -> State:
    """Return attention and LSE of this rank's rows; write new keys, if there are any."""
    host = layer.exchange.host()
    if isinstance(host, HostGroup):
        return _HostRing(layer, host).attend()
    return Ring(layer, tuple(range(layer.exchange.size))).attend()


class Ring:
    """Layer whose shares of keys travel round; `share_of` tells the share of each rank."""

    def __init__(self, layer: RankLayer[ShardedPlan], share_of: tuple[int, ...]) -> None:
        self.layer, self._share_of = layer, share_of
        self.exchange, self.plan, self.inputs = exchange, plan, inputs = (
            layer.exchange, layer.plan, layer.inputs
        )  # fmt: skip
        self.own, self.size = share_of[exchange.rank], max(share_of) + 1
        self.groups = exchange.size  # groups of queries, one per rank
        self.lanes = 1  # ranks that each receive a part of a share
        self.shares = plan.batch.once(
            ("shares", share_of), lambda: plan.batch.shares.of_groups(np.array(share_of))
        )
        self.schedule = ring_schedule(self.own, self.size)
        self.pages = [ring_pages(self.shares, share) for share in range(self.size)]
        self._parts = [no_state(len(inputs.q), inputs.q, inputs.v) for _ in range(self.size)]

    def attend(self) -> State:
        """Return attention and LSE of the queries; write new keys first."""
        rounds, new = self._rounds(), self.layer.new
        routes = OwnerRoutes("attend", self.exchange, self.plan, new, self.layer.num_kv_heads)
        coming = []

        def attend_own(heads: slice, routed: Routed) -> None:
            routes.store(routed)
            block = self.own_block(heads)
            coming.append(self.passed_on(0, block, heads))
            self._attend(0, block, heads)

        side_by_side(rounds, lambda heads, _: routes.begin(heads), attend_own)
        for step in range(1, self.size):
            for i, heads in enumerate(rounds):
                block, posted = coming[i]
                self.wait(posted)
                coming[i] = self.passed_on(step, block, heads)
                self._attend(step, block, heads)
        return merged(self._parts, self.inputs.options.sinks)

    def own_block(self, heads: slice) -> torch.Tensor:
        """Return some heads of this rank's keys, then of their values, as bytes."""
        keys, pages = self.plan.batch.shares.local_keys(self.own), self.pages[self.own]
        counts = self.shares.counts(self.own)
        within = np.arange(len(keys.row)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.full(len(pages.ids) * _PAGE, keys.row[0] if len(keys.row) else 0)
        rows[pages.indptr[keys.request] * _PAGE + within] = keys.row
        taken = self.inputs.take(torch.from_numpy(rows), heads)
        return torch.cat([x.view(torch.uint8).flatten() for x in taken])

    def passed_on(
        self, step: int, block: torch.Tensor, heads: slice
    ) -> tuple[torch.Tensor, Posted]:
        """Send a block on, and receive that of the next step, if there is one."""
        if step == self.size - 1:
            return block, Posted("attend")
        following = self.room(step + 1, heads)
        return following, self.exchange.post("attend", *self.messages(block, following))

    def room(self, step: int, heads: slice) -> torch.Tensor:
        """Make room for some heads of the share of a step."""
        return torch.empty(self.block_bytes(step, heads), dtype=torch.uint8, device="cpu")

    def messages(self, block: torch.Tensor, following: torch.Tensor) -> tuple[Blocks, Blocks]:
        """Return the tensors that this rank sends of a block, and receives of the next, by rank."""
        return {(self.own + 1) % self.size: block}, {(self.own - 1) % self.size: following}

    def wait(self, posted: Posted) -> None:
        """Wait until the block of a step is here."""
        self.exchange.finish(posted)

    def block_bytes(self, step: int, heads: slice) -> int:
        """Return the bytes of some heads of the share of a step."""
        pages = self.pages[self.schedule[step]]
        return block_bytes(self.inputs, pages, heads.stop - heads.start)

    def _attend(self, step: int, block: torch.Tensor, heads: slice) -> None:
        share, inputs = self.schedule[step], self.inputs
        taken = block_tensors(block, inputs, self.pages[share], heads.stop - heads.start)
        q_heads = inputs.q_heads(heads)
        out, lse = self._parts[share]
        attend_part(
            self._call(share), inputs.q[:, q_heads], taken[0], inputs.values_of(taken),
            inputs.options.of_heads(heads, q_heads), partial(self._positions, share),
            state=State(out[:, q_heads], lse[:, q_heads]),
        )  # fmt: skip

    def rows(self) -> slice | Array:
        """Select the queries of the inputs among all queries."""
        return self.plan.local_rows

    def _positions(self, share: int) -> Positions:
        """Return the positions of the queries, and of the keys of a share."""
        batch = self.plan.batch
        tokens = batch.rows.position[self.rows()].astype(np.int32)
        return Positions(tokens, *self.shares.positions(share), batch.tokens.first_positions)

    def _call(self, share: int) -> SequenceCall | None:
        """Return the call with which queries see the keys of a share, made once for all layers."""
        options, batch = self.inputs.options, self.plan.batch

        def make() -> SequenceCall | None:
            own = self.rows()
            rows = Rows(batch.rows.request[own], batch.rows.position[own])
            visibility = Visibility(options.causal, options.window, batch.mask)
            return sequence_call(self.shares, share, self.pages[share], rows, visibility)

        return batch.once((type(self), self._share_of, share, options.causal, options.window), make)

    def _rounds(self) -> list[slice]:
        """Return the KV heads of each round, equal on all ranks that exchange heads."""
        plan, inputs, num_kv_heads = self.plan, self.inputs, self.layer.num_kv_heads
        counts = [int(self.shares.counts(share).sum()) for share in range(self.size)]
        rows = (sum(counts) - min(counts)) // self.lanes
        if self.layer.new is not None and self.exchange.size > 1:
            rows += plan.num_tokens // self.exchange.size
        flops = inputs.flops(plan.num_pairs) // self.groups
        return head_rounds(num_kv_heads, rows * num_kv_heads * inputs.head_bytes, flops)


class _HostRing(Ring):
    """Ring of hosts whose ranks share memory."""

    def __init__(self, layer: RankLayer[ShardedPlan], host: HostGroup) -> None:
        hosts = host.rails.hosts
        of_rank = {rank: i for i, ranks in enumerate(hosts) for rank in ranks}
        share_of = tuple(of_rank[rank] for rank in range(layer.exchange.size))
        super().__init__(layer, share_of)
        ranks = hosts[self.own]
        self._lane = ranks.index(self.exchange.rank)
        self._before, self._next = (hosts[(self.own + i) % self.size] for i in (-1, 1))
        self._lanes_in, self._lanes_out = (
            min(len(ranks), len(others)) for others in (self._before, self._next)
        )
        self.lanes = min(map(len, hosts))
        most = max(block_bytes(self.inputs, pages, 1) for pages in self.pages)
        self._head_bytes = -(-most // _ALIGNMENT) * _ALIGNMENT
        self._scratch = shared_scratch(self.exchange, host, self._head_bytes * layer.num_kv_heads)

    def own_block(self, heads: slice) -> torch.Tensor:
        """Return some heads of this host's keys, after writing this rank's part."""
        keys, pages = self.plan.batch.shares.local_keys(self.plan.cp_rank), self.pages[self.own]
        slots = pages.indptr[keys.request] * _PAGE
        slots = slots + self.shares.count_below(self.own, keys.request, keys.position)
        block = self.room(0, heads)
        taken = self.inputs.take(torch.from_numpy(keys.row), heads)
        wholes = block_tensors(block, self.inputs, pages, heads.stop - heads.start)
        put_rows(wholes, slots, taken)
        self._meet()
        return block

    def room(self, step: int, heads: slice) -> torch.Tensor:
        """Return room for some heads of the share of a step; alternate steps reuse it."""
        begin = self._head_bytes * heads.start
        return self._scratch[step % 2][begin : begin + self.block_bytes(step, heads)]

    def messages(self, block: torch.Tensor, following: torch.Tensor) -> tuple[Blocks, Blocks]:
        """Return parts of the blocks, if the previous and next hosts have as many ranks."""
        sends, receives = {}, {}
        if self._lane < self._lanes_out:
            sends[self._next[self._lane]] = _part(block, self._lane, self._lanes_out)
        if self._lane < self._lanes_in:
            receives[self._before[self._lane]] = _part(following, self._lane, self._lanes_in)
        return sends, receives

    def wait(self, posted: Posted) -> None:
        """Wait until all ranks here have their parts and have finished reading earlier ones."""
        super().wait(posted)
        self._meet()

    def _meet(self) -> None:
        with _core.TraceSpan(_core.TraceScope.gather):
            self.exchange.meet_host("attend")


def _part(block: torch.Tensor, lane: int, lanes: int) -> torch.Tensor:
    return block[len(block) * lane // lanes : len(block) * (lane + 1) // lanes]


def ring_schedule(rank: int, size: int) -> list[int]:
    """Return the owner of a rank's keys at each step: the rank, then its neighbour's previous."""
    return [(rank - step) % size for step in range(size)]


def ring_pages(shares: KeyShares, share: int) -> _core.LocalPages:
    """Return the pages of the keys of a share in a block of it."""
    counts = -(-shares.counts(share) // _PAGE)
    return _core.LocalPages(_PAGE, np.append(0, np.cumsum(counts)), np.arange(counts.sum()))


def _shapes(
    inputs: ShardInputs, pages: _core.LocalPages, num_kv_heads: int
) -> list[tuple[int, int, int]]:
    return [(len(pages.ids) * _PAGE, num_kv_heads, dim) for dim in inputs.kv_dims]


def block_bytes(inputs: ShardInputs, pages: _core.LocalPages, num_kv_heads: int) -> int:
    """Return the bytes of a block with keys and values in so many heads."""
    sizes = [prod(shape) for shape in _shapes(inputs, pages, num_kv_heads)]
    return sum(sizes) * inputs.k.element_size()


def block_tensors(
    block: torch.Tensor, inputs: ShardInputs, pages: _core.LocalPages, num_kv_heads: int
) -> list[torch.Tensor]:
    """Return the block as keys, and values unless they are part of the keys."""
    shapes = _shapes(inputs, pages, num_kv_heads)
    parts = block.split([prod(shape) * inputs.k.element_size() for shape in shapes])
    return [
        part.view(inputs.k.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)
    ]
