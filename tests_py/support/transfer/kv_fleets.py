# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode fleets with real bytes, which identify every head of every token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np

from cpattn.transfer import KVEntry, KVLayout, LocalEngine, plan_kv_links

Key = tuple[bool, int, str]  # draft, layer, kind


@dataclass(frozen=True)
class Model:
    """Sizes of a model; `head_bytes` by kind, where an MLA latent is one head."""

    ids: tuple[int, ...]  # layers with KV in the whole model
    head_bytes: dict[str, int]
    num_heads: int = 1
    num_tokens: int = 24
    max_draft: int = 2

    @cached_property
    def content(self) -> dict[Key, np.ndarray]:
        """Content uint8 [num_tokens, heads, head_bytes] of each buffer."""
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
    """Fleet with pipeline stages by their borders, and ranks within each stage."""

    page_size: int
    borders: tuple[int, ...] = ()  # first layers of the second stage and on
    tp_size: int = 1
    draft: int = 0  # draft layers, in the last stage
    start: int = 0  # first token of page lists
    cp_size: int = 1
    dcp_size: int = 1
    dcp_interleave: int = 1
    shard_size: int = 1  # ranks that stripe pages
    in_order: bool = False  # buffers are in the order of engines, groups of layers, then of drafts
    kv_layout: str = "NHD"
    interleaved: bool = False  # a page has the pages of all buffers


@dataclass(frozen=True)
class Case:
    """Two fleets; one sends tokens from `first` on, in chunks that end with pages."""

    model: Model
    src: Side
    dst: Side
    first: int = 0
    chunks: tuple[int, ...] = ()  # numbers of tokens
    cp_share: str = "pages"
    seed: int = 0

    def ranges(self) -> list[tuple[int, int]]:
        ends = [min(end, self.model.num_tokens) for end in self.chunks]
        ends = [end - end % self.src.page_size for end in ends] + [self.model.num_tokens]
        starts = list(accumulate([self.first, *ends[:-1]], max))
        chunks = [(a, b) for a, b in zip(starts, ends, strict=True) if a < b]
        return chunks or [(self.first, self.model.num_tokens)]

    def sends_whole_pages(self) -> bool:
        """Return whether the last chunk also sends the rows after the last token of its page."""
        src, dst = self.src, self.dst
        src_heads, dst_heads = (max(1, self.model.num_heads // x.tp_size) for x in (src, dst))
        return (
            src_heads == dst_heads
            and src.page_size == dst.page_size
            and self.ranges()[-1][0] % src.page_size == 0
            and (dst.dcp_size == 1 or dst.dcp_interleave % dst.page_size == 0)
            and (src.kv_layout == dst.kv_layout or src_heads == 1 or src.page_size == 1)
        )


@dataclass
class Server:
    """Process with its memory, which has canaries in unwritten places, and its page table."""

    model: Model
    side: Side
    rng: np.random.Generator
    layers: tuple[int, int] | None
    num_draft: int
    tp_rank: int
    cp_rank: int = 0
    dcp_rank: int = 0
    shard_rank: int = 0
    shard_seed: int = 0  # seed of the pages that a group stripes
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
        self.slots = (pages // size * page_size + rows % page_size)[held]  # slots of `tokens`
        keys, gap = self.buffers(), 5  # canaries between buffers
        item_lens = [self.row_bytes(kind) * page_size for _, _, kind in keys]
        widths = [item + gap for item in item_lens]
        if not self.side.interleaved:
            widths = [item * self.num_pages + gap for item in item_lens]
        copies, stride = (self.num_pages, sum(widths)) if self.side.interleaved else (1, None)
        self.memory = self.rng.integers(0, 256, copies * sum(widths), np.uint8)
        addr = self.base
        for i in range(len(keys)) if self.side.in_order else self.rng.permutation(len(keys)):
            draft, layer, kind = keys[i]
            nbytes = (self.num_pages - 1) * (stride or item_lens[i]) + item_lens[i]
            self.entries.append(
                KVEntry(layer, kind, draft, addr, nbytes, item_lens[i], page_stride=stride,
                        kv_layout=self.side.kv_layout)
            )  # fmt: skip
            addr += widths[i]

    @property
    def base(self) -> int:
        return self.memory.ctypes.data

    def buffers(self) -> list[Key]:
        ids = [i for i in self.model.ids if self.layers is None or i in range(*self.layers)]
        owned = [(kind, False, layer) for kind, layer in product(self.model.head_bytes, ids)]
        owned += [(k, True, i) for k, i in product(self.model.head_bytes, range(self.num_draft))]
        return [(draft, layer, kind) for kind, draft, layer in owned]

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

    def cells(self, memory: np.ndarray, entry: KVEntry) -> np.ndarray:
        """Return a view of the bytes of a buffer, [pages, page_size, heads, head_bytes]."""
        head, page_size = self.model.head_bytes[entry.kind], self.side.page_size
        num_heads = self.row_bytes(entry.kind) // head
        strides = (num_heads * head, head) if entry.kv_layout == "NHD" else (head, page_size * head)
        return np.lib.stride_tricks.as_strided(
            memory[entry.addr - self.base :], (self.num_pages, page_size, num_heads, head),
            (entry.page_stride or entry.item_len, *strides, 1),
        )  # fmt: skip

    def fill(self, memory: np.ndarray, first: int, end: int, *, keys: set[Key]) -> None:
        """Write the content of tokens [first, end) into these buffers."""
        chosen = (self.tokens >= first) & (self.tokens < end)
        tokens, slots = self.tokens[chosen], self.slots[chosen]
        for entry in self.entries:
            key = (entry.is_draft, entry.layer_id, entry.kind)
            if key in keys:
                content = self.model.content[key][tokens, self.heads(entry.kind)]
                self.cells(memory, entry)[divmod(slots, self.side.page_size)] = content

    def forget_tail(self, memory: np.ndarray, end: int) -> None:
        """Zero the rows after token `end - 1` in its page."""
        index, row = divmod(int((self.listed < end).sum()), self.side.page_size)
        if row == 0 or self.pages[index] % self.side.shard_size != self.shard_rank:
            return
        page = self.pages[index] // self.side.shard_size
        for entry in self.entries:
            self.cells(memory, entry)[page, row:] = 0


def servers(model: Model, side: Side, seed: int) -> list[Server]:
    rng = np.random.default_rng(seed)
    stages = list(pairwise((0, *side.borders, max(model.ids) + 1)))
    return [
        Server(
            model, side, rng, None if len(stages) == 1 else stage,
            side.draft if stage == stages[-1] else 0, tp_rank, cp_rank, dcp_rank, shard_rank,
            hash((seed, stage, tp_rank, cp_rank)) % 2**32,
        )
        for stage, tp_rank, cp_rank, dcp_rank, shard_rank in product(
            stages, range(side.tp_size), range(side.cp_size), range(side.dcp_size),
            range(side.shard_size),
        )
    ]  # fmt: skip


class Receiver:
    """Fleet whose memory peers of an engine may write, and the expected content at the end."""

    def __init__(self, engine: Any, case: Case) -> None:
        self.engine, self.case = engine, case
        self.servers = servers(case.model, case.dst, case.seed + 1)
        self.expected = [server.memory.copy() for server in self.servers]
        self.registered = register(engine, self.servers)

    def describe(self) -> list[tuple[dict[str, Any], Any]]:
        return [(server.layout.to_dict(), server.pages) for server in self.servers]

    def wrong(self, *, whole_pages: bool | None = None) -> list[str]:
        """End the registration, and describe wrong memory."""
        assert self.engine.unregister(self.registered) == 0
        if whole_pages is None:
            whole_pages = self.case.sends_whole_pages()
        end, found = self.case.model.num_tokens, []
        for i, (server, memory) in enumerate(zip(self.servers, self.expected, strict=True)):
            keys = {key for key in server.buffers() if not key[0] or self.case.src.draft}
            server.fill(memory, self.case.first, end, keys=keys)
            if whole_pages:  # rows after the last token do not count
                server.forget_tail(memory, end)
                server.forget_tail(server.memory, end)
            differ = np.flatnonzero(memory != server.memory)
            found += [f"server {i}: {len(differ)} bytes from {differ[0]}"] if len(differ) else []
        return found


def register(engine: Any, fleet: Sequence[Server]) -> list[int]:
    """Register memory; return the addresses for `unregister`."""
    held = [server for server in fleet if server.memory.size]
    addrs = [server.base for server in held]
    assert engine.register(addrs, [server.memory.nbytes for server in held]) == 0
    return addrs


def filled(case: Case) -> list[Server]:
    sources = servers(case.model, case.src, case.seed)
    for source in sources:
        source.fill(source.memory, 0, case.model.num_tokens, keys=set(source.buffers()))
    return sources


def plan_case(case: Case, sources: Sequence[Server], peers: Any) -> list[Any]:
    layouts = [source.layout for source in sources]
    pages = [source.pages for source in sources], [pages for _, pages in peers]
    return [
        plan_kv_links(
            layouts, [KVLayout.from_dict(layout) for layout, _ in peers], *pages,
            first_token=start, num_tokens=end - start, src_start=case.src.start,
            dst_start=case.dst.start, cp_ranks=[source.cp_rank for source in sources],
            cp_size=case.src.cp_size, cp_share=case.cp_share,
        )
        for start, end in case.ranges()
    ]  # fmt: skip


def check_fleets(model: Model, src: Side, dst: Side, **options: Any) -> Any:
    """Send over all links within this process, and compare every byte of every destination.

    Return the links of the last chunk.
    """
    case = Case(model, src, dst, **options)
    with LocalEngine(num_threads=1) as engine, LocalEngine() as peer:
        receiver, sources = Receiver(peer, case), filled(case)
        register(engine, sources)
        chunks = plan_case(case, sources, receiver.describe())
        for links in chunks:
            assert_no_byte_is_sent_twice([link.plan for link in links])
            for link in links:
                link.plan.execute(engine, peer.session_id)
        assert receiver.wrong() == []
    return chunks[-1]


def assert_no_byte_is_sent_twice(plans: list[Any]) -> None:
    blocks = [(plan.dst_addrs, plan.dst_addrs + plan.lengths) for plan in plans]
    begins, ends = np.concatenate([np.zeros((2, 1), np.uint64), *blocks], axis=1)
    order = np.argsort(begins)
    assert np.all(ends[order][:-1] <= begins[order][1:])


# Calls for the processes of `transfer_processes`.


def prepare(state: Any, case: Case) -> Any:
    state.receiver = Receiver(state.engine, case)
    return state.receiver.describe()


def send(state: Any, case: Case, session: str, peers: Any) -> None:
    sources = filled(case)
    registered = register(state.engine, sources)
    for links in plan_case(case, sources, peers):
        for link in links:
            assert link.plan.execute(state.engine, session) == 0
    assert state.engine.unregister(registered) == 0


def finish(state: Any) -> list[str]:
    return state.receiver.wrong()
