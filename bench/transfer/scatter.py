# SPDX-License-Identifier: Apache-2.0
"""The keys and values of new tokens into the slots of a pool, with and without a cast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import cpattn
from bench.harness.comparison import Comparison, Wrong, percent_of_peak, times_as_fast
from bench.transfer import THREADS, copy_peak

HEADS, HEAD_DIM, PAGE_SIZE = 8, 128, 64
OURS, TORCH = "cpattn", "torch index_put_"
CASTS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
)


def comparisons(quick: bool) -> Iterator[Comparison]:
    slots, num_tokens = (1 << 10, 64) if quick else (1 << 17, 1 << 15)
    for num_threads in [1] if quick else sorted({1, THREADS}):
        for source, stored in CASTS:
            yield of_cast(source, stored, slots, num_tokens, num_threads)


def of_cast(
    source: torch.dtype, stored: torch.dtype, slots: int, num_tokens: int, num_threads: int
) -> Comparison:
    generator = torch.Generator().manual_seed(1)
    shape = num_tokens, HEADS, HEAD_DIM
    k, v = (torch.randn(shape, generator=generator).to(source) for _ in range(2))
    loc = PAGE_SIZE + torch.randperm(slots, generator=generator)[:num_tokens]
    pool = cpattn.kv.MHATokenToKVPool(
        size=slots,
        page_size=PAGE_SIZE,
        num_layers=1,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=name_of(stored),
        container="torch",
    )
    width = stored if stored.itemsize > 1 else torch.uint8
    theirs = torch.zeros(2, pool.num_pages * PAGE_SIZE, HEADS, HEAD_DIM, dtype=width)

    def ours() -> Any:
        pool.set_kv_buffer(0, loc, k, v)
        return pool.get_key_buffer(0), pool.get_value_buffer(0)

    def in_torch() -> Any:
        for buffer, new in zip(theirs, (k, v), strict=True):
            buffer.index_put_((loc,), new.to(stored).view(width))
        return theirs

    def check(name: str, result: Any) -> float:
        for got, new in zip(result, (k, v), strict=True):
            got = got.reshape(-1, HEADS, HEAD_DIM)[loc].view(torch.uint8)
            if not torch.equal(got, new.to(stored).view(torch.uint8)):
                raise Wrong("bytes differ")
        return 0.0

    moved = 2 * k.numel() * (source.itemsize + stored.itemsize)
    return Comparison(
        "scatter",
        {
            "job": f"write K and V, {name_of(source)} to {name_of(stored)}",
            "tokens": num_tokens,
            "threads": num_threads,
        },
        {OURS: ours, TORCH: in_torch},
        check,
        work=(moved / 1e9, "GB"),
        items=(num_tokens, "token"),
        bars=(
            percent_of_peak(OURS, 80 if source == stored else 60),
            times_as_fast(OURS, TORCH, 2, TORCH),
        ),
        peak=copy_peak(num_threads),
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
