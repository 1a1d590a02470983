# SPDX-License-Identifier: Apache-2.0
"""Share of the bfloat16 top-k that the one-byte indexers find: quality, not speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

import cpattn
from bench.harness.contender import Failed
from bench.harness.figures import Row
from bench.harness.runner import failures
from bench.sparse import THREADS
from bench.sparse.indexer import TOPK, Inputs, quantize

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class Structured(Inputs):
    """Queries and keys like those of trained projections: a few directions, and loud channels."""

    @cached_property
    def q(self) -> torch.Tensor:
        return self._shaped(super()._normal(0, self.num_tokens, self.num_heads, self.head_dim))

    @cached_property
    def k(self) -> torch.Tensor:
        return self._shaped(super()._normal(1, self.kv_len, self.head_dim))

    def _shaped(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.arange(1, self.head_dim + 1) ** -0.5
        turn = torch.linalg.qr(self._normal(3, self.head_dim, self.head_dim))[0]
        x = (x * spectrum) @ turn
        x[..., [5, 77]] *= 8
        return x.bfloat16()


class Rotated(Structured):
    """Structured inputs after the Hadamard transform, as in the reference system."""

    def _shaped(self, x: torch.Tensor) -> torch.Tensor:
        return cpattn.sparse.hadamard_transform(super()._shaped(x))


DATA = {"normal": Inputs, "loud channels": Structured, "loud channels, rotated": Rotated}


def rows(quick: bool) -> Iterator[Row]:
    shape = (8, 256, 64) if quick else (64, 16384, 64)
    topk = 32 if quick else TOPK
    for data, kind in DATA.items():
        case = {
            "job": f"recall of the top {topk}",
            "of": shape[1],
            "data": data,
            "threads": THREADS,
        }
        for name, dtype in DTYPES.items():
            about, ours = {"part": "recall", "case": case}, f"cpattn {name}"
            try:
                with failures():
                    found = recall(kind(*shape), dtype, topk)
            except Failed as failed:
                yield about | failed.row(ours)
            else:
                yield about | {"implementation": ours, "status": "ok", "recall": found}


def recall(inputs: Inputs, dtype: torch.dtype, topk: int) -> float:
    """The mean share, over queries, of the bfloat16 top-k that is found."""
    source = quantize(inputs, dtype)
    ranges = inputs.ks, inputs.ke
    wanted = cpattn.sparse.indexer_topk(
        inputs.q, inputs.k, inputs.weights, *ranges, topk=topk, sorted=False
    )
    found = cpattn.sparse.indexer_topk(
        *(source.q, source.k, source.weights, *ranges),
        k_scale=source.k_scale,
        topk=topk,
        sorted=False,
    )
    return float(np.mean([shared(a, b) for a, b in zip(wanted, found, strict=True)]))


def shared(wanted: Any, found: Any) -> float:
    return len(np.intersect1d(wanted, found)) / len(wanted)
