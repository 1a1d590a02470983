# SPDX-License-Identifier: Apache-2.0
"""Top-k of rows of scores, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from bench.harness.comparison import Bar, Comparison, Wrong, nanoseconds, times_as_fast
from cpattn.sparse import sglang_0_5_23

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
ELEMENTS = 1 << 21  # of all rows: too many for branch predictors to learn by heart
OURS, SORTED = "cpattn", "cpattn sorted"
TORCH, NUMPY = "torch.topk", "np.argpartition"


def comparisons(quick: bool) -> Iterator[Comparison]:
    shapes = [(256, 32)] if quick else [(n, k) for k in (2048, 1024, 512) for n in LENGTHS]
    for length, topk in shapes:
        yield of_shape(8 if quick else max(8, ELEMENTS // length), length, topk)


def of_shape(num_rows: int, length: int, topk: int) -> Comparison:
    generator = torch.Generator().manual_seed(length)
    scores = torch.randn(num_rows, length, generator=generator)
    lengths = torch.full((num_rows,), length, dtype=torch.int32)
    implementations: dict[str, Callable[[], Any]] = {
        OURS: lambda: sglang_0_5_23.fast_topk(scores, lengths, topk, sorted=False),
        SORTED: lambda: sglang_0_5_23.fast_topk(scores, lengths, topk),
        TORCH: lambda: torch.topk(scores, topk, sorted=False).indices,
        NUMPY: lambda: np.argpartition(scores.numpy(), length - topk)[:, length - topk :],
    }
    expected = np.argsort(-scores.numpy(), kind="stable")[:, :topk]

    def check(name: str, result: Any) -> float:
        result = np.asarray(result)
        wanted = expected if name == SORTED else np.sort(expected)
        if not np.array_equal(result if name == SORTED else np.sort(result), wanted):
            raise Wrong("not the largest scores")
        return 0.0

    return Comparison(
        "top-k",
        {"job": f"top {topk}", "of": length, "threads": 1},
        implementations,
        check,
        work=(scores.numel() / 1e9, "Gelement"),
        items=(scores.numel(), "element"),
        bars=bars(length) if topk == 2048 else (),
    )


def bars(length: int) -> tuple[Bar, ...]:
    return (
        nanoseconds(OURS, "element", 0.7 if length <= 8192 else 0.45),
        times_as_fast(OURS, TORCH, 10, TORCH),
        times_as_fast(OURS, NUMPY, 4, NUMPY),
    )
