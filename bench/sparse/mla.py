# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA over 2048 keys of each token, anywhere in a pool beyond the last cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

import cpattn
from bench.harness import accuracy
from bench.harness.comparison import Bar, Comparison, Wrong, percent_longer, percent_of_peak
from bench.sparse import THREADS

LATENT, ROPE = 512, 64
SCALE = 192**-0.5  # of the expanded heads
OURS, FP8, TORCH, TORCH_FP8 = "cpattn bf16", "cpattn FP8", "torch bf16", "torch FP8"


def comparisons(quick: bool) -> Iterator[Comparison]:
    if quick:
        yield of_shape(4, 16, THREADS, num_slots=300, topk=64)
        return
    for num_heads, num_tokens in ((128, 48), (64, 96), (16, 192)):
        for num_threads in sorted({1, THREADS}):
            yield of_shape(num_tokens, num_heads, num_threads)


def of_shape(
    num_tokens: int, num_heads: int, num_threads: int, num_slots: int = 1 << 17, topk: int = 2048
) -> Comparison:
    generator = torch.Generator().manual_seed(num_heads)
    rows, kv = pool(num_slots)
    q = torch.randn(num_tokens, num_heads, LATENT + ROPE, generator=generator).bfloat16()
    chosen = [torch.randperm(num_slots, generator=generator)[:topk] for _ in range(num_tokens)]
    indices = torch.stack(chosen).int()[:, None]

    def ours(cache: torch.Tensor) -> torch.Tensor:
        return cpattn.sparse.flash_mla_sparse_fwd(q, cache, indices, SCALE)[0]

    def torch_form(gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.stack([attend(q[t], gather(chosen[t])) for t in range(num_tokens)])

    implementations = {
        OURS: lambda: ours(kv),
        FP8: lambda: ours(rows[:, None]),
        TORCH: lambda: torch_form(lambda index: kv[index, 0]),
        TORCH_FP8: lambda: torch_form(lambda index: expand(rows[index])),
    }
    some = [0, num_tokens - 1]
    expected = torch.stack([attend(q[t].double(), kv[chosen[t], 0].double()) for t in some])

    def check(name: str, result: Any) -> float:
        difference = torch.as_tensor(result)[some].double() - expected
        error = float((difference.norm(dim=-1) / expected.norm(dim=-1)).max())
        if not error <= accuracy.SPARSE_MLA[name.split()[0]]:
            raise Wrong(f"relative error {error:.2g}")
        return error

    flop = 2 * num_tokens * num_heads * topk * (2 * LATENT + ROPE)
    return Comparison(
        "sparse MLA",
        {"job": f"sparse MLA, {topk} keys", "heads": num_heads, "threads": num_threads},
        implementations,
        check,
        work=(flop / 1e9, "GFLOP"),
        items=(num_tokens, "token"),
        bars=bars() if num_heads == 128 else (),
    )


def bars() -> tuple[Bar, ...]:
    amx = cpattn.active_isa().startswith("amx")
    return percent_of_peak(OURS, 35 if amx else 78), percent_longer(FP8, OURS, 8)


def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """One token: q [num_heads, 576], kv [topk, 576]."""
    scores = (q @ kv.T).to(torch.promote_types(q.dtype, torch.float32)) * SCALE
    return torch.softmax(scores, -1).to(q.dtype) @ kv[:, :LATENT]


@cache
def pool(num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows in 656 bytes, and in bfloat16 [num_slots, 1, 576]."""
    generator = torch.Generator().manual_seed(num_slots)
    rows = torch.empty(num_slots, LATENT + 16 + 2 * ROPE, dtype=torch.uint8)
    kv = torch.empty(num_slots, 1, LATENT + ROPE, dtype=torch.bfloat16)
    for some, expanded in zip(rows.split(1 << 14), kv.split(1 << 14), strict=True):
        x = torch.randn(len(some), LATENT + ROPE, generator=generator)
        some.copy_(compress(x[:, :LATENT], x[:, LATENT:]))
        expanded.copy_(expand(some)[:, None])
    return rows, kv


def compress(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """quantize_kv_rows in torch: 512 codes, 4 scales, 64 bfloat16."""
    groups = nope.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1) / 448
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (groups * inverse[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = [codes.flatten(-2), scales, rope.bfloat16()]
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def expand(rows: torch.Tensor) -> torch.Tensor:
    """dequantize_kv_rows in torch: bfloat16 [n, 576]."""
    codes = rows[:, :LATENT].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 128))
    scales = rows[:, LATENT : LATENT + 16].view(torch.float32)
    nope = (codes * scales[..., None]).flatten(-2).bfloat16()
    return torch.cat([nope, rows[:, LATENT + 16 :].view(torch.bfloat16)], -1)
