# SPDX-License-Identifier: Apache-2.0
"""Work for each new token: rows of the FP8 cache, and the split with its two norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import cpattn
from bench.harness import accuracy
from bench.harness.comparison import Comparison, Wrong
from bench.sparse import THREADS
from bench.sparse.mla import LATENT, ROPE, compress, expand, pool

Q_LORA = 1536
EPS = 1e-6
BLOCK = 256  # rows of torch's norms: several times as fast as all at once


def comparisons(quick: bool) -> Iterator[Comparison]:
    num_slots = 300 if quick else 1 << 17
    num_tokens = 64 if quick else 1 << 13  # a chunk of prefill
    for num_threads in [THREADS] if quick else sorted({1, THREADS}):
        yield quantize(num_tokens, num_threads)
        yield dequantize(num_slots, num_tokens, num_threads)
        yield split_norm(num_tokens, num_threads)


def quantize(num_tokens: int, num_threads: int) -> Comparison:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, 1, LATENT + ROPE, generator=generator).bfloat16()
    nope, rope = x[..., :LATENT].contiguous(), x[..., LATENT:].contiguous()
    return Comparison(
        "rows",
        {"job": "quantise KV rows", "tokens": num_tokens, "threads": num_threads},
        {
            "cpattn": lambda: cpattn.sparse.quantize_kv_rows(nope, rope),
            "torch": lambda: compress(nope, rope),
        },
        same_bytes(compress(nope, rope)),
        work=(num_tokens * (2 * 576 + 656) / 1e9, "GB"),
        items=(num_tokens, "token"),
    )


def dequantize(num_slots: int, num_tokens: int, num_threads: int) -> Comparison:
    rows, kv = pool(num_slots)
    index = torch.randperm(num_slots, generator=torch.Generator().manual_seed(2))[:num_tokens]
    index32, caches = index.int(), rows[:, None]
    return Comparison(
        "rows",
        {"job": "dequantise KV rows by index", "tokens": len(index), "threads": num_threads},
        {
            "cpattn": lambda: cpattn.sparse.dequantize_kv_rows(caches, index32),
            "torch": lambda: expand(rows[index]),
        },
        same_bytes(kv[index]),
        work=(len(index) * (656 + 2 * 576) / 1e9, "GB"),
        items=(len(index), "token"),
    )


def split_norm(num_tokens: int, num_threads: int) -> Comparison:
    generator = torch.Generator().manual_seed(3)
    widths = [Q_LORA, LATENT, ROPE]
    x = torch.randn(num_tokens, sum(widths), generator=generator).bfloat16()
    q_weight, kv_weight = (
        (1 + 0.1 * torch.randn(width, generator=generator)).bfloat16() for width in widths[:2]
    )

    def ours() -> Any:
        return cpattn.sparse.fused_split_qk_norm(x, q_weight, kv_weight, *widths, eps=EPS)

    def norm(some: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inverse = torch.rsqrt(some.square().mean(1, keepdim=True).add_(EPS))
        return some.mul(inverse).mul_(weight)

    def torch_form() -> Any:
        weights = q_weight.float(), kv_weight.float()
        parts = [torch.empty(num_tokens, width, dtype=x.dtype) for width in widths]
        for begin in range(0, num_tokens, BLOCK):
            rows = slice(begin, begin + BLOCK)
            q, k_nope, k_pe = x[rows].float().split(widths, -1)
            parts[0][rows], parts[1][rows] = norm(q, weights[0]), norm(k_nope, weights[1])
            parts[2][rows] = k_pe
        return parts[0], parts[1][:, None], parts[2][:, None]

    q, k_nope, k_pe = x.double().split(widths, -1)
    exact = norm(q, q_weight.double()), norm(k_nope, kv_weight.double())[:, None], k_pe[:, None]

    def check(name: str, result: Any) -> float:
        pairs = zip(result, exact, strict=True)
        error = max(float((got - want).norm() / want.norm()) for got, want in pairs)
        if not error <= accuracy.NORMS:
            raise Wrong(f"relative error {error:.2g}")
        return error

    return Comparison(
        "rows",
        {"job": "split and norm q, k", "tokens": num_tokens, "threads": num_threads},
        {"cpattn": ours, "torch": torch_form},
        check,
        work=(num_tokens * sum(widths) * 4 / 1e9, "GB"),
        items=(num_tokens, "token"),
    )


def same_bytes(expected: torch.Tensor) -> Callable[[str, Any], float]:
    def check(name: str, result: Any) -> float:
        if not torch.equal(
            result.reshape(expected.shape).view(torch.uint8), expected.view(torch.uint8)
        ):
            raise Wrong("bytes differ")
        return 0.0

    return check
