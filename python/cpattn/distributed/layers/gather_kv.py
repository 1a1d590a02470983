# SPDX-License-Identifier: Apache-2.0
"""Keys travel to everyone: each rank collects the whole context, and attends as if it held it.

The bits are those of a pool that holds everything. KV heads go in rounds: some arrive while the
last ones are attended to. Scratch of a rank: the keys and values of the heads of two rounds for the
whole context as they arrive, and those of one in their places; what fits into `max_scratch_bytes`,
but one head at least.

New keys that are in no pool yet go from the ranks that computed them to everyone, so that those who
keep them have them from there.

Where ranks share memory, they gather into scratch of their host: each writes what it has, and what
comes to it from one rank of every other host, and all read it there. A row crosses the wire between
two hosts once, and nothing is sent within one.

Cached keys may have been gathered before, by a `Prefetch`, whose next layer then follows the new
keys of this one. Scratch is that of two layers' cached keys then, of all new ones of this layer,
and of the heads of one round in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ... import _core
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from ..transport.host import HostGroup
from ..transport.rails import most_received
from ..transport.row_bytes import ArrivingRows
from ..transport.shared_memory import shared_scratch
from .head_attention import HeadOutputs
from .key_scratch import KeyScratch, Part, key_scratch
from .layer import RankLayer
from .partials import ShardInputs
from .rounds import head_rounds, side_by_side
from .rows import NewRows, put_rows, take_rows

_ALIGNMENT = 64  # bytes, of keys and values in scratch
_COPIES = 3  # of the keys of a round: arriving for the next, arrived, and in their places


def attend(layer: RankLayer[ShardedPlan]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of this rank's rows, and their LSE; new keys are written, if they are given."""
    plan, prefetched, has_rows = layer.plan, layer.prefetched, layer.new is not None
    part = Part(cached=prefetched is None, new_in_pools=not has_rows, new_rows=has_rows)
    scratch = key_scratch(plan, layer.inputs.options.left, part)
    outputs = HeadOutputs(layer)
    gather = _Gather(layer.exchange, layer.inputs, layer.new, scratch, outputs)
    received_rows = sum(scratch.counts) - min(scratch.counts)
    if prefetched is None:
        host = layer.exchange.host()
        if isinstance(host, HostGroup) and not _writes_padding(plan, scratch, layer.new):
            received = most_received(host.rails.hosts, scratch.counts)
            rounds = _rounds(layer, scratch, received, plan.max_scratch_bytes, _COPIES)
            shared = _SharedGather(gather, host, _scratch_of(host, gather, rounds))
            side_by_side(rounds, shared.begin, shared.attend)
            return outputs.rows()
        rounds = _rounds(layer, scratch, received_rows, plan.max_scratch_bytes, _COPIES)
        side_by_side(rounds, gather.begin, gather.attend)
        return outputs.rows()
    new_bytes = sum(scratch.counts) * layer.num_kv_heads * layer.inputs.head_bytes
    free = plan.max_scratch_bytes - prefetched.buffer_bytes - new_bytes
    rounds = _rounds(layer, scratch, received_rows, free, 1)
    coming = [gather.begin(heads, number) for number, heads in enumerate(rounds)]
    cached = prefetched.advance()
    for heads, arriving in zip(rounds, coming, strict=True):
        gather.attend(heads, arriving, cached)
    return outputs.rows()


@dataclass(frozen=True)
class _Gather:
    """A layer of which the ranks gather keys, some KV heads at a time."""

    exchange: RowExchange
    inputs: ShardInputs
    new: NewRows | None
    scratch: KeyScratch
    outputs: HeadOutputs

    def begin(self, heads: slice, buffer: int) -> ArrivingRows:
        """Send this rank's keys in some heads."""
        parts = [rows.flatten(1) for rows in self.own(heads)]
        return self.exchange.begin_rows("attend", self.scratch.counts, parts, buffer)

    def own(self, heads: slice) -> list[torch.Tensor]:
        """Return this rank's keys in some heads: those in pools, then those that are in none."""
        own = self.inputs.take(self.scratch.sent_rows[self.exchange.rank], heads)
        if self.new is not None:
            own = [
                _joined(cached, self.by_heads(rows)[:, heads])
                for cached, rows in zip(own, self.new.rows, strict=True)
            ]
        return own

    def attend(
        self,
        heads: slice,
        arriving: ArrivingRows,
        cached: tuple[KeyScratch, list[torch.Tensor]] | None = None,
    ) -> None:
        """Write what is new, and attend to it and to what is cached, which may be apart."""
        num_heads = heads.stop - heads.start
        rows = [x.unflatten(1, (num_heads, -1)) for x in self.exchange.arrived(arriving)]
        if self.new is not None:
            self.new.store_heads(heads, [take_rows(x, self.scratch.new_rows) for x in rows])
        keys = self.scratch.filled(rows)
        if cached is not None:
            scratch, columns = cached
            scratch.fill(keys, [self.by_heads(x)[:, heads] for x in columns])
        self.outputs.attend(heads, self.scratch.block_tables, keys)

    def by_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all KV heads as [rows, heads, dim]."""
        return rows.unflatten(1, (self.inputs.k.shape[1], -1))


@dataclass(frozen=True)
class _SharedGather:
    """Gathering where ranks share memory: each writes its keys into scratch of its whole host.

    Keys of other hosts come once to each host, by `Rails`. Scratch is of two rounds: a rank that
    writes into that of the last but one has met all others behind it.
    """

    layer: _Gather
    host: HostGroup
    buffers: list[torch.Tensor]

    def begin(self, heads: slice, buffer: int) -> tuple[int, list[torch.Tensor] | ArrivingRows]:
        """Send this rank's keys in some heads to other hosts."""
        own, rails = self.layer.own(heads), self.host.rails
        if not rails.others:
            return buffer, own
        parts, counts = [rows.flatten(1) for rows in own], self.layer.scratch.counts
        exchange = self.layer.exchange
        return buffer, exchange.begin_rows("attend", counts, parts, buffer, rails)

    def attend(self, heads: slice, begun: tuple[int, list[torch.Tensor] | ArrivingRows]) -> None:
        """Write what this rank has to, and attend to what all here have written."""
        layer, rails = self.layer, self.host.rails
        buffer, rows = begun
        if isinstance(rows, ArrivingRows):
            num_heads = heads.stop - heads.start
            arrived = layer.exchange.arrived(rows)
            rows = [x.unflatten(1, (num_heads, -1)) for x in arrived]
        ranks = sorted((rails.rank, *rails.sources))
        slots = torch.cat([layer.scratch.slots_by_rank[rank] for rank in ranks])
        placed = torch.nonzero(slots >= 0).view(-1)
        unfilled = layer.scratch.unfilled[self.host.rank :: self.host.size]
        keys, _ = _keys_in(self.buffers[buffer], layer, heads)
        for whole, part in zip(keys, rows, strict=True):
            put_rows(whole, slots[placed], take_rows(part, placed))
            whole.view(torch.uint8).index_fill_(0, unfilled, 0)
        with _core.TraceSpan(_core.TraceScope.gather):
            layer.exchange.meet_host("attend")
        if layer.new is not None:
            held = layer.scratch.new_slots[layer.new.sources]
            layer.new.put_heads(heads, [take_rows(x, held) for x in keys])
        layer.outputs.attend(heads, layer.scratch.block_tables, keys)


def _scratch_of(host: HostGroup, layer: _Gather, rounds: Sequence[slice]) -> list[torch.Tensor]:
    """Memory for the keys of two rounds."""
    nothing = torch.empty(0, dtype=torch.uint8)
    num_bytes = max(_keys_in(nothing, layer, heads)[1] for heads in rounds)
    return shared_scratch(layer.exchange, host, num_bytes)


def _keys_in(buffer: torch.Tensor, layer: _Gather, heads: slice) -> tuple[list[torch.Tensor], int]:
    """Keys, and values, [num_slots, len(heads), dim] in a buffer, and how many bytes they take.

    No tensors if the buffer is too small.
    """
    dtype, item_bytes = layer.inputs.k.dtype, layer.inputs.k.element_size()
    shapes = [
        (layer.scratch.num_slots, heads.stop - heads.start, dim) for dim in layer.inputs.kv_dims
    ]
    sizes = [prod(shape) * item_bytes for shape in shapes]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    if buffer.numel() < begins[-1]:
        return [], begins[-1]
    keys = [
        buffer[begin : begin + size].view(dtype).view(shape)
        for begin, size, shape in zip(begins, sizes, shapes, strict=False)
    ]
    return keys, begins[-1]


def _writes_padding(plan: ShardedPlan, scratch: KeyScratch, new: NewRows | None) -> bool:
    """Whether pools get rows that nobody attends to, so that they are not in scratch."""
    if new is None:
        return False
    return bool(((scratch.new_slots < 0).numpy() & (plan.batch.owner >= 0)).any())


def _joined(cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """One behind the other, also codes, which torch can only move as bytes."""
    if cached.element_size() > 1:
        return torch.cat([cached, new])
    return torch.cat([cached.view(torch.uint8), new.view(torch.uint8)]).view(cached.dtype)


def _rounds(
    layer: RankLayer[ShardedPlan],
    scratch: KeyScratch,
    received_rows: int,
    free_bytes: int,
    copies: int,
) -> list[slice]:
    """Divide the KV heads into rounds whose `copies` of the context fit into `free_bytes`."""
    num_heads, head_bytes = layer.num_kv_heads, layer.inputs.head_bytes
    largest = free_bytes // max(copies * scratch.num_slots * head_bytes, 1)
    return head_rounds(
        num_heads, received_rows * head_bytes * num_heads, layer.flops, max(largest, 1)
    )
