# SPDX-License-Identifier: Apache-2.0
"""Shapes that bench_attention.py measures, and the bars that each shape has to reach.

Only useful work counts: the products of visible scores, and for one query a sequence the bytes of
visible keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ITEM_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
SCALE_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """A batch of sequences over one paged cache: all facts that a contender needs."""

    name: str
    new: tuple[int, ...]  # query tokens of each sequence, whose keys are cached already
    prefix: tuple[int, ...]  # tokens before them
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"
    page_size: int = 128
    window: int | None = None  # keys visible before a token's own
    behind: int = 0  # keys visible behind it; 0 is causal
    alibi: bool = False  # scores have a bias by distance
    latent: bool = False  # absorbed MLA: a value is the first v_head_dim elements of its key
    cp: tuple[int, int] | None = None  # (rank, size): the blocks of one rank, over one cache
    batch_invariant: bool = False
    kv_dtype: str | None = None  # of the cache, if not that of the queries: 8-bit codes
    kv_scale: str = "tensor"  # of the codes: one, or with "token" one for each token and head
    capacity: int = 0  # tokens that the cache has of each sequence, if more than kv_lens

    @property
    def kv_lens(self) -> list[int]:
        return [n + p for n, p in zip(self.new, self.prefix, strict=True)]

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def stored_lens(self) -> list[int]:
        """The number of cached tokens of each sequence."""
        return [max(length, self.capacity) for length in self.kv_lens]

    @property
    def cached(self) -> int:
        """Tokens in the cache of a context-parallel rank: all of the sequence."""
        assert self.cp is not None
        return 2 * self.cp[1] * self.new[0]

    @property
    def scale(self) -> float:
        """1/sqrt of the head dimension; absorbed MLA keeps that of the expanded form, 192."""
        return (192 if self.latent else self.head_dim) ** -0.5

    @property
    def slopes(self) -> list[float] | None:
        """ALiBi's, of each head."""
        if not self.alibi:
            return None
        return [2 ** (-8 * (head + 1) / self.num_heads) for head in range(self.num_heads)]

    @property
    def is_decode(self) -> bool:
        """One query a sequence: memory is the limit, not arithmetic."""
        return set(self.new) == {1}

    @property
    def visible(self) -> int:
        """Pairs of a query and a key it sees, of one head."""
        return sum(map(self._visible, self.new, self.prefix))

    def _visible(self, new: int, prefix: int) -> int:
        if self.window is None:
            return new * prefix + new * (new + 1) // 2
        before = sum(min(prefix + i, self.window) + 1 for i in range(new))
        return before + sum(min(i, self.behind) for i in range(new))

    @property
    def flop(self) -> int:
        return 2 * (self.head_dim + self.v_head_dim) * self.num_heads * self.visible

    @property
    def kv_bytes(self) -> int:
        """Keys and values that have to be read at least once."""
        lens = [
            length if self.window is None else min(length, new + self.window)
            for length, new in zip(self.kv_lens, self.new, strict=True)
        ]
        tokens = max(lens) if self.cp else sum(lens)
        width = self.head_dim + (0 if self.latent else self.v_head_dim)
        row = width * ITEM_BYTES[self.cache_dtype]
        if self.kv_dtype and self.kv_scale == "token":
            row += 2 * SCALE_BYTES
        return tokens * self.num_kv_heads * row

    @property
    def bytes(self) -> int:
        """The least traffic, for the roofline: keys and values, the queries and the output."""
        width = self.num_heads * (self.head_dim + self.v_head_dim)
        return self.kv_bytes + sum(self.new) * width * ITEM_BYTES[self.dtype]

    @property
    def out_bytes(self) -> int:
        return sum(self.new) * self.num_heads * self.v_head_dim * ITEM_BYTES[self.dtype]

    @property
    def work(self) -> tuple[float, str]:
        return (self.kv_bytes / 1e9, "GB") if self.is_decode else (self.flop / 1e9, "GFLOP")


@dataclass(frozen=True)
class Case:
    """A workload with its contenders, its number of threads and its bars."""

    workload: Workload
    all_threads: bool = True  # or one
    peers: bool = True  # or cpattn alone
    without: str = ""  # a peer that would take the time of all the others
    bar: float | None = None  # percent of the peak
    amx_bar: float | None = None  # the same with AMX
    series: tuple[str, int] | None = None  # a curve of the plots, and the place on it
    base: str | None = None  # the workload that differs in one thing only
    within: float | None = None  # percent of the time of that one


def dense(*lengths: int, **options: Any) -> Workload:
    name = f"causal {len(lengths)} × {lengths[0]}"
    return replace(Workload(name, lengths, (0,) * len(lengths)), **options)


def zigzag(rank: int, *, total: int = 32768, size: int = 8) -> Workload:
    """One rank of a zigzag split: block `rank` from the start, and the same from the end."""
    block = total // (2 * size)
    prefix = (rank * block, (2 * size - 1 - rank) * block)
    name = f"{total // 1024}K zigzag over {size}, rank {rank}"
    return Workload(name, (block, block), prefix, cp=(rank, size))


RAGGED = Workload(
    "ragged batch of 8",
    new=(37, 128, 511, 1024, 2048, 300, 77, 900),
    prefix=(0, 4096, 1000, 0, 2048, 8191, 64, 500),
)
PREFIX = Workload("2048 new behind 8192 cached", (2048,), (8192,))
DECODE = Workload("decode 16 × 1, KV 8192", (1,) * 16, (8191,) * 16)
MLA: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128}
ABSORBED: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True}


def traffic(trace: Path | None, divisor: int = 4, budget: int = 8192) -> Iterator[Workload]:
    """Two batches of prefills from serving traffic: a trace's lengths divided by `divisor`.

    Requests in order of arrival, prefixes found in an unbounded cache, up to `budget` new tokens:
    the batch of the most requests, and the one with the longest prefixes.
    """
    from cpattn_lab.traffic import trace as traces

    if trace is None:
        requests, origin = traces.generate_trace(256), "generated trace"
    else:
        requests, origin = traces.read_trace(trace, limit=256), "real trace"
    requests = traces.scale_lengths(requests, divisor)
    hits = traces.unbounded_hits(requests, traces.TRACE_BLOCK_TOKENS // divisor)
    batches: list[list[tuple[int, int]]] = [[]]
    for request, hit in zip(requests, hits, strict=True):
        cached = min(hit, request.input_length - 1)  # the last token is always computed
        tokens = min(request.input_length - cached, budget)
        if sum(n for n, _ in batches[-1]) + tokens > budget:
            batches.append([])
        batches[-1].append((tokens, cached))
    longest = max(batches, key=lambda batch: sum(prefix for _, prefix in batch))
    for kind, batch in (("most requests", max(batches, key=len)), ("longest prefixes", longest)):
        name = f"{origin} / {divisor}, {kind} ({len(batch)})"
        new, prefix = (tuple(lengths) for lengths in zip(*batch, strict=True))
        yield Workload(name, new, prefix)


def full(trace: Path | None = None) -> list[Case]:
    """Every case of a full run, the ones with bars first."""
    return [*_with_bars(), *_variants(trace), *_scaling()]


def _with_bars() -> Iterator[Case]:
    yield Case(PREFIX, bar=85, amx_bar=40)
    yield Case(dense(8192), bar=85, amx_bar=40, series=("length", 8192))
    yield Case(RAGGED, bar=80, amx_bar=34)
    yield Case(dense(4096), series=("length", 4096))
    yield Case(
        dense(4096, name="head_dim 64, causal 1 × 4096", head_dim=64, v_head_dim=64),
        bar=75,
        amx_bar=26,
    )
    yield Case(
        dense(4096, name="MLA expanded 192/128, 16 heads, 1 × 4096", **MLA), bar=80, amx_bar=40
    )
    name = "MLA absorbed 576/512, 16 heads, 1 × 4096"
    yield Case(dense(4096, name=name, num_heads=16, **ABSORBED), bar=85)
    name = "MLA absorbed 576/512, 128 heads, 1 × 2048"
    work = dense(2048, name=name, num_heads=128, **ABSORBED)
    yield Case(work, without="torch_sdpa", bar=85, amx_bar=42)  # 14 s and 7 GB
    yield Case(dense(4096, name="float32, causal 1 × 4096", dtype="float32"), bar=90)
    yield Case(dense(4096, name="float16, causal 1 × 4096", dtype="float16"), bar=85, amx_bar=130)
    yield Case(DECODE, bar=75, amx_bar=75)
    for rank in range(8):
        case = Case(zigzag(rank), peers=rank in (0, 7), bar=85, amx_bar=40)
        yield replace(case, without="torch_flex")
    yield Case(dense(4096), all_threads=False)
    yield Case(dense(8192), all_threads=False, bar=85, amx_bar=40, peers=False)


def _variants(trace: Path | None) -> Iterator[Case]:
    for work in traffic(trace):
        yield Case(work)
    yield Case(dense(4096, name="window 1024, causal 1 × 4096", window=1024))
    one_side = dense(16384, name="window 64, causal 1 × 16384", window=64)
    both = replace(one_side, name="window 64 on both sides, 1 × 16384", behind=64)
    yield Case(one_side)
    yield Case(both, base=one_side.name, within=10)  # of the time for each product
    for work in (dense(4096), DECODE):
        biased = replace(work, name=f"ALiBi, {work.name}", alibi=True)
        yield Case(biased, base=work.name)
    for size in (1, 16, 64, 512):
        work = replace(RAGGED, name=f"ragged batch of 8, pages of {size}", page_size=size)
        yield Case(work, peers=False, base=RAGGED.name, within=25 if size == 1 else 10)
    for work in (RAGGED, DECODE):
        invariant = replace(work, name=f"{work.name}, batch_invariant", batch_invariant=True)
        yield Case(invariant, peers=False, base=work.name, within=15 if work is DECODE else None)
    name = "MLA decode 576/512, 16 heads, 16 × 1, KV 8192"
    yield Case(replace(DECODE, name=name, num_heads=16, **ABSORBED))


def _scaling() -> Iterator[Case]:
    for length in (128, 256, 512, 1024, 2048, 16384):
        yield Case(dense(length), series=("length", length))
    for batch in (1, 2, 4, 8, 16):
        work = Workload(f"256 behind 1024, batch {batch}", (256,) * batch, (1024,) * batch)
        yield Case(work, series=("batch", batch))
    yield Case(dense(65536), peers=False, series=("length", 65536))


def quick() -> list[Case]:
    """One small case of each kind."""
    return [
        Case(Workload("64 new behind 192 cached", (64,), (192,))),
        Case(Workload("ragged", (3, 20, 40), (0, 70, 9), page_size=16)),
        Case(Workload("decode", (1, 1), (300, 300), dtype="float32")),
        Case(dense(64, name="window 16", window=16, dtype="float16")),
        Case(dense(64, name="window 16 on both sides", window=16, behind=16)),
        Case(dense(64, name="ALiBi", alibi=True)),
        Case(replace(zigzag(1, total=256, size=2), name="zigzag"), all_threads=False),
        Case(dense(64, name="MLA absorbed", num_heads=16, **ABSORBED)),
    ]


def starts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The half-open range of rows of each of consecutive sequences."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return list(pairwise([0, *ends]))
