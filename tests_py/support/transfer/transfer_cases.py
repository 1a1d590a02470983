# SPDX-License-Identifier: Apache-2.0
"""Pairs of servers, a request's KV cache on them, and what a transfer must leave behind.

A prompt's bytes are a function of the case's seed and of what they are (layer, kind, token,
head), so that each process computes by itself what it holds or has to receive, without any
plan: `Server.fill` puts the prompt where a server with these pools would have it.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product
from typing import Any

import numpy as np

from cpattn.kv import MHATokenToKVPool, MLATokenToKVPool
from cpattn.transfer import KVEntry, KVLayout

CANARY = 0xA5  # every byte of a receiving pool that is not the request's
SCRATCH = 0x5C  # and of a sending one

# Bytes of a slot in the buffers of metadata and of state; a request has one slot.
METADATA = {"aux": (64, 512, 64), "mamba": (96, 40)}
NUM_SLOTS = 6

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDTHS |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), 1)


@dataclass(frozen=True)
class Model:
    """What both servers agree on. MHA if `num_kv_heads`, else MLA with 2 or 3 buffers a layer."""

    layer_ids: tuple[int, ...]  # layers that have a KV cache; not all in a hybrid model
    num_kv_heads: int = 0
    head_dim: int = 8
    v_head_dim: int = 8
    index_head_dim: int | None = None
    dtype: str = "bfloat16"
    scale_dtype: str | None = None  # of scales of each token and head

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.scale_dtype is not None:
            return ("k", "v", "k_scale", "v_scale")
        return ("k", "v") if self.index_head_dim is None else ("k", "v", "index_k")

    def row_bytes(self, kind: str) -> int:
        """Bytes of a token in one head."""
        if self.scale_dtype is not None and kind.endswith("_scale"):
            return WIDTHS[self.scale_dtype]
        dims = {"k": self.head_dim, "v": self.v_head_dim, "index_k": self.index_head_dim}
        return dims[kind] * WIDTHS[self.dtype]


@dataclass(frozen=True)
class Rank:
    """Where one process of a server stands."""

    pp: int = 0
    tp: int = 0
    dcp: int = 0


@dataclass(frozen=True)
class Server:
    stages: tuple[int, ...]  # layers with a KV cache in each pipeline stage
    tp_size: int = 1
    page_size: int = 16
    use_fia: bool = False
    draft_layers: int = 0  # on the last stage
    dcp_size: int = 1
    dcp_interleave: int = 1
    num_pages: int = 24

    @property
    def ranks(self) -> list[Rank]:
        return [
            Rank(*at)
            for at in product(range(len(self.stages)), range(self.tp_size), range(self.dcp_size))
        ]

    def stage(self, rank: Rank) -> slice:
        """Of the model's layers."""
        ends = list(accumulate(self.stages, initial=0))
        return slice(ends[rank.pp], ends[rank.pp + 1])

    def num_draft_layers(self, rank: Rank) -> int:
        return self.draft_layers if rank.pp == len(self.stages) - 1 else 0

    def heads(self, model: Model, rank: Rank) -> slice:
        """Of the model's KV heads; an MLA latent is one that every rank has."""
        total = max(model.num_kv_heads, 1)
        first = rank.tp * total // self.tp_size
        return slice(first, first + max(total // self.tp_size, 1))

    def slots(self, rank: Rank, pages: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Where the rank keeps these tokens of the request with these pages; -1: elsewhere."""
        interleave, size = self.dcp_interleave, self.dcp_size
        local = tokens // (interleave * size) * interleave + tokens % interleave
        slots = pages[local // self.page_size] * self.page_size + local % self.page_size
        return np.where(tokens // interleave % size == rank.dcp, slots, -1)


@dataclass(frozen=True)
class Case:
    name: str
    model: Model
    prefill: Server
    decode: Server
    num_tokens: int
    prefix: int = 0  # tokens the decode server has already
    chunks: tuple[int, ...] = ()  # numbers of tokens after which the prefill server sends
    cp_size: int = 1
    cp_share: str = "pages"
    planner: str = "layouts"  # "layouts", or as engines do it: "lists", or "compat"
    seed: int = 0

    def slot(self, server: Server) -> int:
        """Of the request in buffers of metadata."""
        return (self.seed + (server is self.decode)) % NUM_SLOTS

    def metadata(self, kind: str, i: int) -> np.ndarray:
        """What the request has in a buffer of metadata."""
        seed = [self.seed, len(kind), i]
        return np.random.default_rng(seed).integers(0, 256, METADATA[kind][i], np.uint8)

    def pages(self, server: Server) -> np.ndarray:
        """The request's pages on a server, in runs and in no order; page 0 is nobody's."""
        num_pages = -(-self.num_tokens // (server.page_size * server.dcp_size))
        rng = np.random.default_rng([self.seed, server is self.decode])
        pieces = np.array_split(np.arange(1, server.num_pages), server.num_pages // 3)
        rng.shuffle(pieces)
        return np.concatenate(pieces)[:num_pages]

    def sends(self) -> list[tuple[int, int]]:
        """Ranges of tokens; a partial page waits until more of it or the end is there."""
        computed = [min(end, self.num_tokens) for end in self.chunks]
        ends = [end - end % self.prefill.page_size for end in computed] + [self.num_tokens]
        starts = list(accumulate([self.prefix, *ends[:-1]], max))
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    @property
    def sends_whole_pages(self) -> bool:
        """In the last send, so with the rest of the prompt's last page."""
        prefill, decode = self.prefill, self.decode
        if self.planner != "layouts":
            return True
        return (
            prefill.heads(self.model, Rank()) == decode.heads(self.model, Rank())
            and prefill.page_size == decode.page_size
            and self.sends()[-1][0] % decode.page_size == 0
            and (decode.dcp_size == 1 or decode.dcp_interleave % decode.page_size == 0)
        )

    def prompt(self, layer: int, kind: str, is_draft: bool) -> np.ndarray:
        """uint8 [num_tokens, heads of the model, bytes of a head]"""
        seed = [self.seed, layer, self.model.kinds.index(kind), is_draft]
        shape = (self.num_tokens, max(self.model.num_kv_heads, 1), self.model.row_bytes(kind))
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class RankPools:
    """The pools of one rank, and their bytes: uint8 [num_slots, heads, bytes of a head]."""

    def __init__(self, case: Case, server: Server, rank: Rank) -> None:
        self.case, self.server, self.rank = case, server, rank
        model, stage = case.model, server.stage(rank)
        self.layer_ids = model.layer_ids[stage]
        self.layers = (
            model.layer_ids[stage.start] if rank.pp else 0,
            [*model.layer_ids, model.layer_ids[-1] + 1][stage.stop],
        )
        self.pool = self._make_pool(len(self.layer_ids), self.layer_ids[0])
        num_draft = server.num_draft_layers(rank)
        self.draft_pool = self._make_pool(num_draft, 0) if num_draft else None
        self.metadata = {
            kind: [np.empty((NUM_SLOTS, width), np.uint8) for width in widths]
            for kind, widths in METADATA.items()
        }
        self.buffers: dict[tuple[int, str, bool], np.ndarray] = {}
        self._add_buffers(self.pool, self.layer_ids, is_draft=False)
        if self.draft_pool is not None:
            self._add_buffers(self.draft_pool, range(num_draft), is_draft=True)

    def _make_pool(self, num_layers: int, start_layer: int) -> Any:
        model, server = self.case.model, self.server
        page_size = server.page_size
        options = {
            "size": (server.num_pages - 1) * page_size,
            "page_size": page_size,
            "num_layers": num_layers,
            "start_layer": start_layer,
            "dtype": model.dtype,
            "use_fia": server.use_fia,
        }
        if not model.num_kv_heads:
            return MLATokenToKVPool(
                kv_lora_rank=model.head_dim,
                qk_rope_head_dim=model.v_head_dim,
                index_head_dim=model.index_head_dim,
                **options,
            )
        heads = server.heads(model, self.rank)
        return MHATokenToKVPool(
            num_kv_heads=heads.stop - heads.start,
            head_dim=model.head_dim,
            v_head_dim=model.v_head_dim,
            scale_dtype=model.scale_dtype,
            **options,
        )

    def _add_buffers(self, pool: Any, layer_ids: Sequence[int], *, is_draft: bool) -> None:
        addrs, sizes, _ = pool.get_contiguous_buf_infos()
        keys = [(layer, kind, is_draft) for kind in pool.kinds for layer in layer_ids]
        num_heads = pool.num_kv_heads
        for key, addr, size in zip(keys, addrs, sizes, strict=True):
            flat = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(addr))
            self.buffers[key] = flat.reshape(-1, num_heads, self.case.model.row_bytes(key[1]))

    def fill(self, value: int) -> None:
        for rows in [*self.buffers.values(), *chain(*self.metadata.values())]:
            rows[:] = value

    def place_metadata(self) -> None:
        for kind, buffers in self.metadata.items():
            for i, slots in enumerate(buffers):
                slots[self.case.slot(self.server)] = self.case.metadata(kind, i)

    def place_prompt(self, tokens: np.ndarray, *, is_draft: bool | None = None) -> None:
        """Write what these tokens have here, in all layers or only in drafts or only in others."""
        heads = self.server.heads(self.case.model, self.rank)
        slots = self.server.slots(self.rank, self.case.pages(self.server), tokens)
        here = slots >= 0
        for key, rows in self.buffers.items():
            if is_draft is None or is_draft is key[2]:
                rows[slots[here]] = self.case.prompt(*key)[tokens[here], heads]

    def place_tail(self, value: int, *, is_draft: bool) -> None:
        """Fill what the prompt leaves of its last page."""
        server, end = self.server, self.case.num_tokens
        tail = np.arange(end, end + -end % server.page_size)
        slots = server.slots(self.rank, self.case.pages(server), tail)
        for key, rows in self.buffers.items():
            if is_draft is key[2]:
                rows[slots[slots >= 0]] = value

    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes of every buffer."""
        buffers = [*self.buffers.values(), *chain(*self.metadata.values())]
        return [(rows.ctypes.data, rows.nbytes) for rows in buffers]

    def layout(self) -> KVLayout:
        model, server, rank = self.case.model, self.server, self.rank
        placement = {
            "tp_rank": rank.tp,
            "tp_size": server.tp_size,
            "total_kv_heads": max(model.num_kv_heads, 1),
            "layers": self.layers,
            "dcp_rank": rank.dcp,
            "dcp_size": server.dcp_size,
            "dcp_interleave": server.dcp_interleave,
        }
        if self.layer_ids == tuple(range(self.layer_ids[0], self.layer_ids[-1] + 1)):
            return KVLayout.from_pool(self.pool, self.draft_pool, **placement)
        entries = [
            KVEntry(
                layer,
                kind,
                is_draft,
                rows.ctypes.data,
                rows.nbytes,
                rows[0].nbytes * server.page_size,
            )
            for (layer, kind, is_draft), rows in self.buffers.items()
        ]
        return KVLayout(entries, server.page_size, **placement)

    def checksums(self) -> dict[Any, list[int]]:
        """crc32 of every page of every buffer, and of every slot of metadata."""
        items = {key: rows.reshape(self.server.num_pages, -1) for key, rows in self.buffers.items()}
        for kind, buffers in self.metadata.items():
            items |= {(kind, i): slots for i, slots in enumerate(buffers)}
        return {key: [zlib.crc32(item) for item in rows] for key, rows in items.items()}
