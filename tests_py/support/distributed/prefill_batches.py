# SPDX-License-Identifier: Apache-2.0
"""Prefill batches with cached prefixes: their inputs, and their attention in float64."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from support.cases import expected_attention, one_after_another
from support.tolerances import Expected


@dataclass(frozen=True)
class Case:
    name: str
    extend_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...] = ()
    strategy: str = "zigzag"
    page_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    dtype: torch.dtype = torch.float32
    num_tokens: int | None = None
    pad_to_physical: bool = False

    @property
    def prefixes(self) -> tuple[int, ...]:
        return self.prefix_lens or (0,) * len(self.extend_lens)

    @property
    def seq_lens(self) -> list[int]:
        return [p + n for p, n in zip(self.prefixes, self.extend_lens, strict=True)]


LONG = Case("long prefix", (5,), (1500,), page_size=64)
BATCHES = [
    Case("one request", (29,)),
    Case("issue 23415", (367,), (1,), page_size=16),
    LONG,
    Case("different prefixes", (13, 40, 9), (64, 0, 7)),
    Case("prefix ends in a page", (10, 14), (5, 0), page_size=16),
    Case("decode and prefill", (1, 1, 1, 30, 18, 2), (9, 33, 1, 0, 12, 3)),
    Case("prefill and decode", (30, 18, 2, 1, 1), (0, 12, 3, 9, 33)),
    Case("short requests", (3, 1, 2), (0, 5, 0), page_size=2),
    Case("fewer tokens than ranks", (1,), (6,)),
    Case("empty request", (0, 11, 0), (8, 2, 0)),
    Case("nothing new", (0, 0), (8, 3)),
    Case("no keys", (0, 0)),
    Case("padding tokens", (9, 6), (3, 5), num_tokens=22),
    Case("physical padding", (9, 15), (3, 5), pad_to_physical=True),
    Case("bfloat16", (21, 90), (60, 0), dtype=torch.bfloat16),
    Case("float16", (21, 18), (6, 0), dtype=torch.float16),
    Case("narrow values", (21, 18), (6, 0), head_dim=48, v_head_dim=32, num_kv_heads=1),
    Case("heads for no number of ranks", (21, 18), (6, 0), num_heads=7, num_kv_heads=7),
    Case("fewer heads than ranks", (21, 18), (6, 0), num_heads=1, num_kv_heads=1),
]


@dataclass
class Batch:
    """Inputs of a case, equal on all ranks. Pools have only cached prefixes, and NaN in slots that
    no call may read."""

    block_tables: torch.Tensor  # with missing pages after the last one of each request
    k: list[torch.Tensor]  # prefix and new tokens of each request [seq_len, heads, dim]
    v: list[torch.Tensor]
    q: torch.Tensor  # queries of the new tokens of all requests
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def new(self, case: Case, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return rows of the new tokens, with NaN for padding tokens."""
        new = torch.cat([x[p:] for x, p in zip(rows, case.prefixes, strict=True)])
        return pad_rows(new, len(self.q) - len(new))


def pad_rows(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([x, x.new_full((n, *x.shape[1:]), torch.nan)])


def make_batch(case: Case) -> Batch:
    random = torch.Generator().manual_seed(len(case.extend_lens) + sum(case.extend_lens))
    shuffled = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(case.dtype)

    k = [normal(n, case.num_kv_heads, case.head_dim) for n in case.seq_lens]
    v = [normal(n, case.num_kv_heads, case.v_head_dim) for n in case.seq_lens]
    num_tokens = case.num_tokens or sum(case.extend_lens)
    pages = [-(-n // case.page_size) for n in case.seq_lens]
    ids = torch.randperm(sum(pages) + 2, generator=shuffled)
    tables = torch.full((len(pages), max(pages) + 1), 2**30)
    # Padding tokens do read the next slots in the pool, which must be finite.
    unread = torch.nan if case.num_tokens is None else 3.0
    slots = len(ids) * case.page_size
    k_cache = torch.full((slots, case.num_kv_heads, case.head_dim), unread, dtype=case.dtype)
    v_cache = torch.full((slots, case.num_kv_heads, case.v_head_dim), unread, dtype=case.dtype)
    for s, (n, prefix) in enumerate(zip(pages, case.prefixes, strict=True)):
        tables[s, :n], ids = ids[:n], ids[n:]
        cached = slots_of(tables, s, prefix, case.page_size)
        k_cache[cached], v_cache[cached] = k[s][:prefix], v[s][:prefix]
    q = pad_rows(
        normal(sum(case.extend_lens), case.num_heads, case.head_dim),
        num_tokens - sum(case.extend_lens),
    )
    return Batch(tables, k, v, q, k_cache, v_cache)


def slots_of(block_tables: torch.Tensor, sequence: int, n: int, page_size: int) -> torch.Tensor:
    """Return the pool rows of the first n tokens of a sequence."""
    pages = block_tables[sequence].repeat_interleave(page_size)[:n]
    return pages * page_size + torch.arange(n) % page_size


def new_slots(tables: Any, prefixes: Any, lens: Any, page_size: int) -> torch.Tensor:
    """Return the pool rows of the tokens after each prefix."""
    tables = torch.as_tensor(tables).long()
    ends = enumerate(zip(prefixes, lens, strict=True))
    return torch.cat([slots_of(tables, s, n, page_size)[cached:] for s, (cached, n) in ends])


@cache
def expected_of(case: Case) -> Expected:
    """Return attention of every new token in float64, with the measures of errors."""
    batch = make_batch(case)
    q, k, v = batch.q[: sum(case.extend_lens)], torch.cat(batch.k), torch.cat(batch.v)
    return expected_attention(one_after_another(q, k, v, case.extend_lens, case.seq_lens))
