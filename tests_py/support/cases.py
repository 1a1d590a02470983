# SPDX-License-Identifier: Apache-2.0
"""Attention batches for tests, and the comparison of a result with the oracle. Inputs are hostile:
shuffled pages, strided tensors, -1 or huge ids behind a table, NaN in unread places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cpattn import reference
from support.tolerances import Expected, assert_attended, score_size, to_float64

torch.set_num_threads(1)  # torch only makes small inputs here

UNUSED_PAGES = (-1, 1 << 30)
DTYPES = ("float32", "float16", "bfloat16")
BIASES = {"bias", "alibi_slopes", "relative_bias"}


class Named:
    """Frozen dataclass of sizes; its name lists the fields that differ from their defaults."""

    def __str__(self) -> str:
        default = type(self)()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(parts).replace(" ", "") or "default"


@dataclass(frozen=True)
class Case(Named):
    """The sizes of a batch; `kv_layout` "3-D" means slots without pages."""

    q_lens: tuple[int, ...] = (5, 3)
    kv_lens: tuple[int, ...] = (37, 19)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    page_size: int = 16
    kv_layout: str = "NHD"
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a NaN tensor with gaps between its rows, which are not aligned to vectors."""
    whole = torch.full([n + 2 for n in shape[:-1]] + [shape[-1] + 8], torch.nan, dtype=dtype)
    return whole[tuple(slice(1, n + 1) for n in shape[:-1])][..., 1 : shape[-1] + 1]


def strided_copy(x: torch.Tensor) -> torch.Tensor:
    return strided(tuple(x.shape), x.dtype).copy_(x)


def shuffled_tables(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return tables with a page for every block of tokens, and the number of pages with spares."""
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    num_pages = sum(counts) + 2
    pages = rng.permutation(num_pages)
    tables = rng.choice(UNUSED_PAGES, (len(counts), max(counts, default=0) + 1)).astype(np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], pages = pages[:count], pages[count:]
    return tables, num_pages


def first_visible(case: Case, sequence: int) -> int:
    window = case.options.get("window")
    window = window[0] if isinstance(window, tuple) else window
    first_position = case.kv_lens[sequence] - case.q_lens[sequence]
    first_position = case.options.get("first_positions", {sequence: first_position})[sequence]
    return 0 if window is None else max(0, first_position - window)


def make_cache(
    case: Case, tables: np.ndarray, num_pages: int, head_dim: int, rng: np.random.Generator
) -> torch.Tensor:
    """Return [num_pages, page_size, num_kv_heads, head_dim] with NaN in unread places."""
    dtype = getattr(torch, case.dtype)
    cache = strided((num_pages, case.page_size, case.num_kv_heads, head_dim), dtype)
    if case.kv_layout == "HND":
        cache = strided((num_pages, case.num_kv_heads, case.page_size, head_dim), dtype)
        cache = cache.transpose(1, 2)
    elif case.kv_layout == "3-D":
        cache = strided((num_pages * case.page_size, *cache.shape[2:]), dtype)
        cache = cache.unflatten(0, (num_pages, case.page_size))
    for sequence, kv_len in enumerate(case.kv_lens):
        token = np.arange(first_visible(case, sequence), kv_len)
        pages = tables[sequence, token // case.page_size]
        values = rng.standard_normal((len(token), case.num_kv_heads, head_dim))
        cache[pages, token % case.page_size] = torch.from_numpy(values).to(dtype)
    return cache


def in_layout(case: Case, cache: torch.Tensor) -> torch.Tensor:
    """Return the pages of make_cache() in the layout of the case, without a copy."""
    if case.kv_layout == "3-D":
        return cache.flatten(0, 1)
    return cache.transpose(1, 2) if case.kv_layout == "HND" else cache


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Return arguments of paged_attention, which are also the oracle's."""
    rng = np.random.default_rng(seed)
    tables, num_pages = shuffled_tables(case, rng)
    q = rng.standard_normal((sum(case.q_lens), case.num_heads, case.head_dim))
    k_cache = make_cache(case, tables, num_pages, case.head_dim, rng)
    v_cache = make_cache(case, tables, num_pages, case.v_head_dim or case.head_dim, rng)
    options = dict(case.options)
    if any(q_len > kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)):
        options["allow_short_kv"] = True
    return {
        "q": strided_copy(torch.from_numpy(q).to(getattr(torch, case.dtype))),
        "k_cache": in_layout(case, k_cache),
        "v_cache": in_layout(case, v_cache),
        "q_lens": case.q_lens,
        "kv_lens": case.kv_lens,
        "block_tables": tables,
        "page_size": case.page_size,
        "kv_layout": "HND" if case.kv_layout == "HND" else "NHD",
        **options,
    }


def one_after_another(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: Any, kv_lens: Any, **options: Any
) -> dict[str, Any]:
    """Return arguments of the oracle for K and V [sum(kv_lens), heads, dim] without pages."""
    starts = np.cumsum([0, *kv_lens], dtype=np.int64)[:-1, None]
    tables = starts + np.arange(max(kv_lens, default=0))
    lens = {"q_lens": q_lens, "kv_lens": kv_lens, "block_tables": tables, "page_size": 1}
    return {"q": q, "k_cache": k, "v_cache": v, **lens, **options}


def expected_attention(inputs: dict[str, Any]) -> Expected:
    """Return the oracle's out and lse, and the measures of their errors."""
    v = inputs["v_cache"]
    inputs = inputs | {"scale": inputs.get("scale") or inputs["q"].shape[-1] ** -0.5}
    with_magnitude = inputs | {"v_cache": torch.cat([v, v.abs()], -1)}
    out, lse = reference.paged_attention(**with_magnitude)
    out, magnitude = np.split(out, 2, axis=-1)
    keys = inputs["k_cache"]
    if inputs.get("kv_layout") == "HND":
        keys = keys.transpose(1, 2)
    size = score_size(inputs["q"], keys, inputs["scale"]) + bias_size(inputs)
    spread, num_keys = squares_of(inputs, lse)
    return Expected(out, lse, magnitude, spread, num_keys, size, inputs["q"].shape[-1])


def bias_size(inputs: dict[str, Any]) -> float:
    size = 0.0
    for name in BIASES & inputs.keys():
        parts = inputs[name] if isinstance(inputs[name], list) else [inputs[name]]
        numbers = np.concatenate([to_float64(part).ravel() for part in parts])
        largest = np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0)
        size += largest * (max(inputs["kv_lens"]) if name == "alibi_slopes" else 1)
    return size


def squares_of(inputs: dict[str, Any], lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `spread` and `num_keys` of Expected: weights of doubled scores are squares."""
    doubled = {"scale": 2 * inputs["scale"], "softcap": 2 * inputs.get("softcap", 0.0)}
    for name in BIASES & inputs.keys():
        bias = inputs[name]
        doubled[name] = [2 * x for x in bias] if isinstance(bias, list) else 2 * bias
    squares, lse_of_squares = reference.paged_attention(
        **inputs | doubled | {"v_cache": inputs["v_cache"].double().square(), "sinks": None}
    )
    whole = lse if inputs.get("sinks") is None else np.logaddexp(lse, to_float64(inputs["sinks"]))
    with np.errstate(invalid="ignore"):  # rows without keys, values that are not finite
        shares = np.nan_to_num(np.exp(lse_of_squares - 2 * whole))
        spread = np.nan_to_num(np.sqrt(squares * shares[..., None]), posinf=0)
        return spread, np.nan_to_num(np.exp(2 * lse - lse_of_squares))


def assert_attention(
    out, lse, inputs, op="attention", expected=None, rounds_values=False, precise=False
) -> None:
    """Compare a result with the oracle's for these arguments; an LSE of None is not compared."""
    dtype = str(inputs["q"].dtype).removeprefix("torch.")
    expected = expected or expected_attention(inputs)
    softcap = inputs.get("softcap", 0.0)
    assert_attended(out, lse, expected, dtype, op, softcap, rounds_values, precise)


def numbers(*shape: int) -> torch.Tensor:
    """Return random numbers in float32, always the same."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))


def random_bias(
    q_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, dtype: str = "float32"
) -> list[torch.Tensor]:
    """Return a bias for each sequence, with -inf in a quarter of it and in some whole rows."""
    rng = np.random.default_rng(0)
    biases = []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        bias = rng.standard_normal((num_heads, q_len, kv_len))
        bias[rng.random(bias.shape) < 0.25] = -np.inf
        bias[:, ::7] = -np.inf
        biases.append(strided_copy(torch.from_numpy(bias).to(getattr(torch, dtype))))
    return biases


def dense(masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return `custom_mask`: the rows of all sequences."""
    return np.concatenate([mask.ravel() for mask in masks])


def packed(masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return `packed_custom_mask`: bits, where every sequence begins at a new byte."""
    return np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
