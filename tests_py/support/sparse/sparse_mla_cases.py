# SPDX-License-Identifier: Apache-2.0
"""Tokens with selected keys, hostile by default, and the comparison with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cpattn import reference
from support.cases import Named, strided_copy
from support.tolerances import (
    Expected,
    allowed_lse_error,
    assert_attended,
    assert_within,
    score_size,
    to_float64,
)

NO_KEYS = (-1, -(2**31), 2**31 - 1)  # indices of no key, like the number of rows


@dataclass(frozen=True)
class Case(Named):
    """Batch with `counts` valid indices of each token; the rest of a row names no key."""

    counts: tuple[int, ...] = (40, 0, 64, 7)
    topk: int = 64
    num_rows: int = 150
    num_heads: int = 4
    head_dim: int = 64
    v_head_dim: int = 48
    dtype: str = "float32"
    index_dtype: str = "int32"
    sinks: bool = False
    lengths: bool = False  # topk_length says which entries count; others name NaN rows
    options: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Return arguments of flash_mla_sparse_fwd, with NaN in rows without an index."""
    rng = np.random.default_rng(seed)
    dtype = getattr(torch, case.dtype)
    used = rng.permutation(case.num_rows)[: case.num_rows * 2 // 3]
    unused = np.setdiff1d(np.arange(case.num_rows), used)
    kv = torch.full((case.num_rows, 1, case.head_dim), torch.nan, dtype=dtype)
    rows = torch.from_numpy(rng.standard_normal((len(used), 1, case.head_dim)))
    kv[used] = rows.to(dtype)
    q = rng.standard_normal((len(case.counts), case.num_heads, case.head_dim))
    indices = rng.choice((*NO_KEYS, case.num_rows), (len(case.counts), 1, case.topk))
    lengths = np.full(len(case.counts), case.topk)
    for token, count in enumerate(case.counts):
        if case.lengths:
            lengths[token] = rng.integers(count, case.topk + 1)
            indices[token, 0, lengths[token] :] = rng.choice(unused, case.topk - lengths[token])
        places = rng.permutation(lengths[token])[:count]
        indices[token, 0, places] = rng.choice(used, count)  # some rows occur more than once
    inputs = {
        "q": strided_copy(torch.from_numpy(q).to(dtype)),
        "kv": strided_copy(kv),
        "indices": torch.from_numpy(indices.astype(case.index_dtype)),
        "sm_scale": case.head_dim**-0.5,
        "d_v": case.v_head_dim,
        **case.options,
    }
    if case.sinks:
        sinks = torch.from_numpy(rng.standard_normal(case.num_heads)).float()
        sinks[:2] = torch.tensor([torch.inf, -torch.inf])[: case.num_heads]
        inputs["attn_sink"] = sinks
    if case.lengths:
        inputs["topk_length"] = lengths
    return inputs


def errors_of(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the measures of errors: the last fields of Expected."""
    kv, scale, d_v = (
        to_float64(inputs["kv"]).reshape(-1, inputs["kv"].shape[-1]),
        inputs["sm_scale"],
        inputs["d_v"],
    )
    magnitude, squares = np.zeros((2, *inputs["q"].shape[:2], d_v))
    num_keys, sizes = np.zeros((2, *inputs["q"].shape[:2]))
    for token, q in enumerate(to_float64(inputs["q"])):
        count = inputs.get("topk_length", [None] * len(sizes))[token]
        row = inputs["indices"][token].reshape(-1)[:count].numpy().astype(np.int64)
        keys = kv[row[(row >= 0) & (row < len(kv))]]
        if len(keys):
            scores = scale * q @ keys.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            magnitude[token] = weights @ np.abs(keys[:, :d_v])
            squares[token] = weights**2 @ keys[:, :d_v] ** 2
            num_keys[token] = 1 / (weights**2).sum(axis=1)
            sizes[token] = score_size(q, keys[:, None], scale)
    return magnitude, np.sqrt(squares), num_keys, sizes, inputs["q"].shape[-1]


def expected_result(inputs: dict[str, Any]) -> tuple[Expected, np.ndarray]:
    """Return the oracle's out, lse and max_logits."""
    out, max_logits, lse = reference.flash_mla_sparse_fwd(**inputs)
    return Expected(out, lse, *errors_of(inputs)), max_logits


def assert_result(result, inputs, expected=None) -> None:
    dtype = str(inputs["q"].dtype).removeprefix("torch.")
    out, max_logits, lse = result
    attended, expected_max = expected or expected_result(inputs)
    assert_attended(out, lse, attended, dtype)
    allowed = allowed_lse_error(attended, dtype, score=expected_max)
    assert_within(max_logits, expected_max, allowed, "the largest logit")


def fp8_rows(num_rows: int) -> torch.Tensor:
    """Return uint8 [num_rows, 1, 656]: 512 codes, 4 float32 scales, 64 bfloat16 numbers each."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (num_rows, 1, 656), dtype=torch.uint8, generator=generator)
    codes = rows[..., :512]
    codes[codes & 127 == 127] = 0  # NaN
    rows[..., 512:528].view(torch.float32).uniform_(1e-3, 2e-2, generator=generator)
    rows[..., 528:].view(torch.bfloat16).normal_(generator=generator)
    return rows


def expanded(rows: torch.Tensor) -> torch.Tensor:
    codes = rows[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = rows[..., 512:528].view(torch.float32)
    nope = (codes * scales[..., None]).flatten(-2).to(torch.bfloat16)
    return torch.cat([nope, rows[..., 528:].view(torch.bfloat16)], dim=-1)
