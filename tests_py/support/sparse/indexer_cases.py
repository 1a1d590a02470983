# SPDX-License-Identifier: Apache-2.0
"""Inputs of the indexer, and what it must make of them."""

from typing import Any

import numpy as np
import torch

from cpattn import reference
from support.cases import strided
from support.sparse.topk_cases import expected_topk
from support.tolerances import assert_close, indexer_units, to_float64

DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


def values(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Random numbers of a dtype in a window of a larger tensor; int8 takes its whole range."""
    rng = np.random.default_rng(seed)
    if dtype == "int8":
        return torch.from_numpy(rng.integers(-128, 128, [*shape[:-1], shape[-1] + 3], np.int8))[
            ..., 1 : shape[-1] + 1
        ]
    x = torch.from_numpy(rng.standard_normal(shape, np.float32)).to(getattr(torch, dtype))
    if dtype == "float8_e4m3fn":
        return torch.stack([x, x], -2)[..., 0, :]
    return strided(shape, x.dtype).copy_(x)


def make_inputs(
    num_queries: int = 7,
    num_keys: int = 333,
    *,
    heads: int = 3,
    dim: int = 64,
    dtype: str = "bfloat16",
    scales: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments by name, with ranges of all lengths, empty and inverted ones among them."""
    rng = np.random.default_rng(seed)
    ks, ke = rng.integers(0, num_keys + 1, (2, num_queries))
    ks[:1], ke[:1] = 0, num_keys
    inputs = {
        "q": values((num_queries, heads, dim), dtype, seed + 1),
        "k": values((num_keys, dim), dtype, seed + 2),
        "weights": values((num_queries, heads), "float32", seed + 3),
        "ks": ks,
        "ke": ke,
    }
    if scales:
        inputs["k_scale"] = torch.from_numpy(rng.uniform(0.1, 2, num_keys).astype(np.float32))
    return inputs


def expected_logits(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's, and their magnitudes: the same scores with all products positive."""
    exact = inputs | {name: to_float64(inputs[name]) for name in ("q", "k", "weights")}
    positive = exact | {name: np.abs(exact[name]) for name in ("q", "k", "weights")}
    magnitude = reference.indexer_logits(**positive)
    return reference.indexer_logits(**exact), np.maximum(magnitude, 0)


def assert_logits(logits: Any, inputs: dict[str, Any], expected: Any = None) -> None:
    units = indexer_units(inputs["q"].shape[1])
    assert_close(logits, *(expected or expected_logits(inputs)), "indexer", "float32", units)


def best_keys(logits: Any, inputs: dict[str, Any], topk: int, in_order: bool) -> np.ndarray:
    lengths = np.subtract(inputs["ke"], inputs["ks"])
    return expected_topk(logits, lengths, topk, inputs["ks"], sorted=in_order)
