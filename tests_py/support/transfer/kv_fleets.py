# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode fleets with real bytes: every head of every token is known by its content."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np

from cpattn.transfer import KVEntry, KVLayout, TransferPlan, plan_kv_links

Key = tuple[bool, int, str]  # draft, layer, kind


@dataclass(frozen=True)
class Model:
    """`head_bytes` by kind: an MLA latent is one head."""

    ids: tuple[int, ...]  # layers with KV, of the whole model
    head_bytes: dict[str, int]
    num_heads: int = 1
    num_tokens: int = 24
    max_draft: int = 2

    @cached_property
    def content(self) -> dict[Key, np.ndarray]:
        """uint8 [num_tokens, heads, head_bytes] of each buffer."""
        rng = np.random.default_rng(7)
        keys = [(False, layer) for layer in self.ids]
        keys += [(True, layer) for layer in range(self.max_draft)]
        return {
            (*key, kind): rng.integers(0, 256, (self.num_tokens, self.heads(kind), width), np.uint8)
            for key, (kind, width) in product(keys, self.head_bytes.items())
        }

    def heads(self, kind: str) -> int:
        return 1 if kind == "index_k" else self.num_heads


@dataclass(frozen=True)
class Side:
    """A fleet: pipeline stages by their borders, ranks within each stage."""

    page_size: int
    borders: tuple[int, ...] = ()  # first layers of the second stage and on
    tp_size: int = 1
    draft: int = 0  # layers, with the last stage
    start: int = 0  # the token with which page lists begin
    cp_size: int = 1
    dcp_size: int = 1
    dcp_interleave: int = 1
    shard_size: int = 1  # ranks that stripe pages


@dataclass
class Server:
    """A process: its memory, with canaries wherever nothing is written, and its page table."""

    model: Model
    side: Side
    rng: np.random.Generator
    layers: tuple[int, int] | None
    num_draft: int
    tp_rank: int
    cp_rank: int = 0
    dcp_rank: int = 0
    shard_rank: int = 0
    shard_seed: int = 0  # of the pages that a group stripes
    base: int = 1 << 48
    entries: list[KVEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        size, page_size = self.side.shard_size, self.side.page_size
        tokens = [t for t in range(self.side.start, self.model.num_tokens) if self.owns(t)]
        self.listed = np.array(tokens, np.int64)
        num_pages = -(-len(tokens) // page_size)
        self.num_pages = num_pages + 3
        rng = self.rng if size == 1 else np.random.default_rng(self.shard_seed)
        self.pages = rng.permutation(self.num_pages * size)[:num_pages]
        rows = np.arange(len(tokens))
        pages = self.pages[rows // page_size]
        held = pages % size == self.shard_rank
        self.tokens = self.listed[held]
        self.slots = (pages // size * page_size + rows % page_size)[held]  # of `tokens`
        self.memory = self.rng.integers(0, 256, 0, np.uint8)
        offset = 0
        for draft, layer, kind in self.rng.permutation(np.array(self.buffers(), object)):
            item_len = self.row_bytes(kind) * self.side.page_size
            nbytes = item_len * self.num_pages
            addr = self.base + offset
            self.entries.append(KVEntry(layer, kind, draft, addr, nbytes, item_len))
            offset += nbytes + 5  # canaries between buffers
        self.memory = self.rng.integers(0, 256, offset, np.uint8)

    def buffers(self) -> list[Key]:
        ids = [i for i in self.model.ids if self.layers is None or i in range(*self.layers)]
        owned = [(False, layer) for layer in ids]
        owned += [(True, layer) for layer in range(self.num_draft)]
        return [(*key, kind) for key, kind in product(owned, self.model.head_bytes)]

    def owns(self, token: int) -> bool:
        side = self.side
        return token // side.dcp_interleave % side.dcp_size == self.dcp_rank

    def heads(self, kind: str) -> slice:
        total = self.model.heads(kind)
        if total >= self.side.tp_size:
            count = total // self.side.tp_size
            return slice(self.tp_rank * count, (self.tp_rank + 1) * count)
        head = self.tp_rank * total // self.side.tp_size
        return slice(head, head + 1)

    def row_bytes(self, kind: str) -> int:
        heads = self.heads(kind)
        return (heads.stop - heads.start) * self.model.head_bytes[kind]

    @cached_property
    def layout(self) -> KVLayout:
        side = self.side
        return KVLayout(
            self.entries, side.page_size, tp_rank=self.tp_rank, tp_size=side.tp_size,
            total_kv_heads=self.model.num_heads, layers=self.layers, dcp_rank=self.dcp_rank,
            dcp_size=side.dcp_size, dcp_interleave=side.dcp_interleave,
            shard_rank=self.shard_rank, shard_size=side.shard_size,
        )  # fmt: skip

    def rows(self, memory: np.ndarray, entry: KVEntry) -> np.ndarray:
        """Slots of a buffer, as a view."""
        begin = entry.addr - self.base
        return memory[begin : begin + entry.nbytes].reshape(-1, self.row_bytes(entry.kind))

    def fill(self, memory: np.ndarray, first: int, end: int, *, keys: set[Key]) -> None:
        """Writes what tokens [first, end) have in these buffers."""
        chosen = (self.tokens >= first) & (self.tokens < end)
        tokens, slots = self.tokens[chosen], self.slots[chosen]
        for entry in self.entries:
            key = (entry.is_draft, entry.layer_id, entry.kind)
            if key in keys:
                content = self.model.content[key][tokens, self.heads(entry.kind)]
                self.rows(memory, entry)[slots] = content.reshape(
                    len(tokens), self.row_bytes(entry.kind)
                )

    def forget_tail(self, memory: np.ndarray, end: int) -> None:
        """Zeroes rows behind token `end - 1` in its page."""
        page_size = self.side.page_size
        index, row = divmod(int((self.listed < end).sum()), page_size)
        if row == 0 or self.pages[index] % self.side.shard_size != self.shard_rank:
            return
        first = self.pages[index] // self.side.shard_size * page_size
        for entry in self.entries:
            self.rows(memory, entry)[first + row : first + page_size] = 0


def servers(model: Model, side: Side, seed: int, base: int) -> list[Server]:
    """All processes of a fleet."""
    rng = np.random.default_rng(seed)
    cuts = (0, *side.borders, max(model.ids) + 1)
    stages = list(pairwise(cuts))
    return [
        Server(
            model, side, rng, None if len(stages) == 1 else stage,
            side.draft if stage == stages[-1] else 0, tp_rank, cp_rank, dcp_rank, shard_rank,
            hash((seed, stage, tp_rank, cp_rank)) % 2**32, base,
        )
        for stage, tp_rank, cp_rank, dcp_rank, shard_rank in product(
            stages, range(side.tp_size), range(side.cp_size), range(side.dcp_size),
            range(side.shard_size),
        )
    ]  # fmt: skip


def copy(plan: TransferPlan, source: Server, destination: Server) -> None:
    for src, dst, length in zip(
        (plan.src_addrs - np.uint64(source.base)).tolist(),
        (plan.dst_addrs - np.uint64(destination.base)).tolist(),
        plan.lengths.tolist(),
        strict=True,
    ):
        assert src + length <= len(source.memory)
        destination.memory[dst : dst + length] = source.memory[src : src + length]


def check_fleets(
    model: Model, src: Side, dst: Side, *, first: int = 0, cp_share: str = "pages", seed: int = 0
) -> Any:
    """Sends tokens from `first` on over all links, and compares every byte of every destination.

    Returns the links.
    """
    sources = servers(model, src, seed, 1 << 48)
    destinations = servers(model, dst, seed + 1, 1 << 49)
    for source in sources:
        source.fill(source.memory, 0, model.num_tokens, keys=set(source.buffers()))
    expected = [destination.memory.copy() for destination in destinations]
    links = plan_kv_links(
        [source.layout for source in sources],
        [destination.layout for destination in destinations],
        [source.pages for source in sources],
        [destination.pages for destination in destinations],
        first_token=first, num_tokens=model.num_tokens - first, src_start=src.start,
        dst_start=dst.start, cp_ranks=[source.cp_rank for source in sources], cp_size=src.cp_size,
        cp_share=cp_share,
    )  # fmt: skip
    for source, destination, plan in links:
        copy(plan, sources[source], destinations[destination])
    same_heads = sources[0].row_bytes("k") == destinations[0].row_bytes("k")
    by_pages = (
        same_heads
        and src.page_size == dst.page_size
        and first % src.page_size == 0
        and (dst.dcp_size == 1 or dst.dcp_interleave % dst.page_size == 0)
    )
    for destination, memory in zip(destinations, expected, strict=True):
        keys = {key for key in destination.buffers() if not key[0] or src.draft}
        destination.fill(memory, first, model.num_tokens, keys=keys)
        if by_pages:  # what comes behind the last token is nobody's
            destination.forget_tail(memory, model.num_tokens)
            destination.forget_tail(destination.memory, model.num_tokens)
        np.testing.assert_array_equal(destination.memory, memory)
    return links
