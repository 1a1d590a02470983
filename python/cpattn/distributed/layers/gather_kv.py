# SPDX-License-Identifier: Apache-2.0
"""Exchange that gathers keys: each rank collects the whole context and attends to it alone.

The bits are those of a pool that holds all keys. KV heads go in rounds: some arrive while the
previous ones are computed. Scratch of a rank: keys and values of the heads of two rounds, as
received for the whole context, and of one round in place; rounds fit into `max_scratch_bytes` but
have at least one head.

New keys that are in no pool yet go from the ranks that computed them to all ranks, which includes
the ranks that keep them.

Ranks that share memory gather into scratch of their host: each writes its own keys and those it
receives from one rank of every other host, and all ranks of the host read them. A row travels once
between two hosts, and never within a host.

A `Prefetch` may have gathered cached keys before; the keys of its next layer then follow the new
keys of this layer. Scratch then has cached keys of two layers, all new keys of this layer, and the
heads of one round in place.
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
_COPIES = 3  # of a round's keys: arriving for the next round, arrived, and in place


def attend(layer: RankLayer[ShardedPlan]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention and LSE of this rank's rows; write new keys, if there are any."""
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
    """Layer whose keys the ranks gather, some KV heads at a time."""

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
        """Return this rank's keys in some heads: keys of pools, then keys that are in no pool."""
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
        """Write new keys, and attend to them and to cached keys, which may be in another buffer."""
        num_heads = heads.stop - heads.start
        rows = [x.unflatten(1, (num_heads, -1)) for x in self.exchange.arrived(arriving)]
        if self.new is not None:
            self.new.store_heads(
                heads, self.new.slots, [take_rows(x, self.scratch.new_rows) for x in rows]
            )
        keys = self.scratch.filled(rows)
        if cached is not None:
            scratch, columns = cached
            scratch.fill(keys, [self.by_heads(x)[:, heads] for x in columns])
        self.outputs.attend(heads, self.scratch.block_tables, keys)

    def by_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of all KV heads as [rows, heads, dim]."""
        return rows.unflatten(1, (self.inputs.k.shape[1], -1))


@dataclass(frozen=True)
class _SharedGather:
    """Gather for ranks that share memory: each writes its keys into scratch of its whole host.

    Each host receives keys of other hosts once, by `Rails`. Scratch has room for two rounds: a rank
    that reuses the older room has met all other ranks since.
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
        """Write this rank's keys, and attend to the keys that all ranks here have written."""
        layer, rails = self.layer, self.host.rails
        buffer, rows = begun
        if isinstance(rows, ArrivingRows):
            num_heads = heads.stop - heads.start
            arrived = layer.exchange.arrived(rows)
            rows = [x.unflatten(1, (num_heads, -1)) for x in arrived]
        ranks = sorted((rails.rank, *rails.sources))
        slots = torch.cat([layer.scratch.slots_by_rank[rank] for rank in ranks])
        unfilled = layer.scratch.unfilled[self.host.rank :: self.host.size]
        keys, _ = _keys_in(self.buffers[buffer], layer, heads)
        put_rows(keys, slots, rows)
        for whole in keys:
            whole.view(torch.uint8).index_fill_(0, unfilled, 0)
        with _core.TraceSpan(_core.TraceScope.gather):
            layer.exchange.meet_host("attend")
        if layer.new is not None:
            held = layer.new.slots >= 0
            places = layer.scratch.new_slots[torch.from_numpy(held)]
            layer.new.store_heads(
                heads, layer.new.slots[held], [take_rows(x, places) for x in keys]
            )
        layer.outputs.attend(heads, layer.scratch.block_tables, keys)


def _scratch_of(host: HostGroup, layer: _Gather, rounds: Sequence[slice]) -> list[torch.Tensor]:
    """Return memory for the keys of two rounds."""
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    num_bytes = max(_keys_in(nothing, layer, heads)[1] for heads in rounds)
    return shared_scratch(layer.exchange, host, num_bytes)


def _keys_in(buffer: torch.Tensor, layer: _Gather, heads: slice) -> tuple[list[torch.Tensor], int]:
    """Return keys and values [num_slots, len(heads), dim] in a buffer, and their bytes.

    There are no tensors if the buffer is too small.
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
    """Tell whether pools receive rows that no token attends to, which are not in scratch."""
    if new is None:
        return False
    return bool(((scratch.new_slots < 0).numpy() & (plan.batch.owner >= 0)).any())


def _joined(cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Concatenate two tensors; codes go as bytes, the only form torch can move."""
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
