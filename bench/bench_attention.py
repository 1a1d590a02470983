# SPDX-License-Identifier: Apache-2.0
"""Paged attention against torch's scaled_dot_product_attention with a mask.

torch has no paged attention on the CPU, so the peer first gathers the pages ("gather + SDPA",
what an engine does); "SDPA, gathered" leaves that out of its time. Causal attention behind a
prefix needs a mask there: is_causal aligns to the top left. Only visible scores count as work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cpattn
from cpattn import torch_guard
from harness import Suite

if message := torch_guard.prepare():
    print(message)

import torch
import torch.nn.functional as F

from cpattn import _core

NUM_HEADS, NUM_KV_HEADS, PAGE_SIZE = 32, 8, 128
RAGGED_NEW = (37, 128, 511, 1024, 2048, 300, 77, 900)
RAGGED_PREFIX = (0, 4096, 1000, 0, 2048, 8191, 64, 500)


@dataclass(frozen=True)
class Workload:
    name: str
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    bar: float | None = None  # times the speed of gather + SDPA

    @property
    def kv_lens(self) -> list[int]:
        return [n + p for n, p in zip(self.new, self.prefix, strict=True)]

    @property
    def gflop(self) -> float:
        visible = sum(n * p + n * (n + 1) // 2 for n, p in zip(self.new, self.prefix, strict=True))
        return 4e-9 * self.head_dim * NUM_HEADS * visible


WORKLOADS = (
    Workload("2048 new behind 8192 cached", (2048,), (8192,), bar=1.0),
    Workload("causal 4096", (4096,), (0,), bar=1.0),
    Workload("ragged batch of 8", RAGGED_NEW, RAGGED_PREFIX, bar=1.0),
    Workload("head_dim 64, causal 4096", (4096,), (0,), head_dim=64, bar=1.0),
    Workload("float32, causal 4096", (4096,), (0,), dtype=torch.float32, bar=1.0),
    Workload("float16, causal 4096", (4096,), (0,), dtype=torch.float16, bar=1.0),
)
QUICK = (Workload("64 new behind 192 cached", (64,), (192,)),)


def make_tensors(work: Workload) -> dict[str, Any]:
    """Random tensors with shuffled pages, and the masks SDPA needs."""
    generator = torch.Generator().manual_seed(0)
    pages = [-(-length // PAGE_SIZE) for length in work.kv_lens]
    order = torch.randperm(sum(pages), generator=generator, dtype=torch.int64)
    block_tables = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
    first = 0
    for row, count in enumerate(pages):
        block_tables[row, :count] = order[first : first + count]
        first += count
    cache = (sum(pages), PAGE_SIZE, NUM_KV_HEADS, work.head_dim)
    return {
        "q": torch.randn(sum(work.new), NUM_HEADS, work.head_dim, generator=generator).to(
            work.dtype
        ),
        "k": torch.randn(cache, generator=generator).to(work.dtype),
        "v": torch.randn(cache, generator=generator).to(work.dtype),
        "block_tables": block_tables,
        "masks": [
            torch.ones(n, p + n, dtype=torch.bool).tril(p)
            for n, p in zip(work.new, work.prefix, strict=True)
        ],
    }


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The rows of one sequence as SDPA wants them: [1, heads, length, dim]."""
    pages = cache[table[: -(-length // PAGE_SIZE)].long()]
    return pages.flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)


def implementations(work: Workload) -> dict[str, Callable[[], torch.Tensor]]:
    data = make_tensors(work)
    q, k, v, tables = data["q"], data["k"], data["v"], data["block_tables"]
    plan = {"q_lens": list(work.new), "kv_lens": work.kv_lens, "block_tables": tables}

    def gathered() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (gather(k, row, length), gather(v, row, length))
            for row, length in zip(tables, work.kv_lens, strict=True)
        ]

    def sdpa(sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        outputs = []
        chunks = q.split(work.new)
        for x, (keys, values), mask in zip(chunks, sequences, data["masks"], strict=True):
            query = x.transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    ready = [(keys.contiguous(), values.contiguous()) for keys, values in gathered()]
    return {
        "cpattn": lambda: cpattn.paged_attention(q, k, v, **plan),
        "SDPA, gathered": lambda: sdpa(ready),
        "gather + SDPA": lambda: sdpa(gathered()),
    }


def peak_gflops(dtype: str, num_threads: int) -> float:
    return _core.measure_peak(dtype, num_threads) / 1e9


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Both round once to the output's dtype and their probabilities to bf16 or better: 4 eps."""
    eps = torch.finfo(expected.dtype).eps
    tolerance = 4 * eps if expected.dtype != torch.float32 else 64 * eps
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def main() -> int:
    suite = Suite("attention", "Paged attention, 32 query and 8 KV heads, shuffled pages of 128")
    for num_threads in suite.cases([2, 1], quick=[1]):
        cpattn.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        for work in suite.cases(WORKLOADS if num_threads > 1 else WORKLOADS[:1], quick=QUICK):
            dtype = str(work.dtype).removeprefix("torch.")
            suite.compare(
                {"workload": work.name, "threads": num_threads},
                implementations(work),
                make_inputs=tuple,
                assert_same=assert_close,
                work=(work.gflop, "GFLOP"),
                peak=partial(peak_gflops, dtype, num_threads),
                bar=work.bar,
            )
    return suite.finish()


if __name__ == "__main__":
    raise SystemExit(main())
