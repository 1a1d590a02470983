# SPDX-License-Identifier: Apache-2.0
"""Writes how far attention over caches of 8 bits is off into docs/how_to/kv_8bit.md.

Rows go through the pools, and their codes and scales as they are kept there into the oracle, which
also computes the truth, on the numbers before they were written. `--check` writes nothing and fails
where the page has other numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cpattn

PAGE = Path(__file__).parents[1] / "docs" / "how_to" / "kv_8bit.md"
BEGIN, END = "<!-- errors: scripts/kv_8bit_errors.py -->\n", "<!-- end of errors -->\n"

KEYS, PAGE_SIZE, HEADS, DIM, QUERIES, GROUP = 2048, 128, 8, 128, 32, 2
HEAVY_CHANNELS, HEAVY = 4, (10.0, 20.0)
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}

Array = NDArray[Any]


class Data(NamedTuple):
    q: Array  # [QUERIES, HEADS * GROUP, DIM]
    k: Array  # [KEYS, HEADS, DIM]
    v: Array


class Error(NamedTuple):
    """Of the outputs, in parts of their root mean square."""

    mean: float
    largest: float


def normal_data() -> Data:
    """Numbers of the standard normal distribution, in float32."""
    rng = np.random.default_rng(2026)
    shapes = (QUERIES, HEADS * GROUP, DIM), (KEYS, HEADS, DIM), (KEYS, HEADS, DIM)
    return Data(*(rng.standard_normal(shape, np.float32) for shape in shapes))


def heavy_data() -> Data:
    """The same, with few channels of the keys of each head 10 to 20 times as large."""
    q, k, v = normal_data()
    rng = np.random.default_rng(7)
    for head in range(HEADS):
        channels = rng.choice(DIM, HEAVY_CHANNELS, replace=False)
        k[:, head, channels] *= rng.uniform(*HEAVY, HEAVY_CHANNELS).astype(np.float32)
    return Data(q, k, v)


def attended(data: Data, k: Array, v: Array) -> Array:
    pages = [x.reshape(-1, PAGE_SIZE, HEADS, DIM) for x in (k, v)]
    table = np.arange(KEYS // PAGE_SIZE)[None]
    out, _ = cpattn.reference.paged_attention(
        data.q, *pages, q_lens=[QUERIES], kv_lens=[KEYS], block_tables=table
    )
    return out


def as_kept(data: Data, dtype: str, scales: str) -> tuple[Array, Array]:
    """Keys and values as a pool has them, in float64."""
    of_tokens = scales.removeprefix("token and head, ") if scales.startswith("token") else None
    pool = cpattn.kv.MHATokenToKVPool(
        size=KEYS - PAGE_SIZE, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=HEADS,
        head_dim=DIM, dtype=dtype, scale_dtype=of_tokens, use_fia=True, container="numpy",
    )  # fmt: skip
    given: list[Array] = []
    if scales in ("tensor", "head"):
        axes = (0, 1, 2) if scales == "tensor" else (0, 2)
        given = [np.abs(x).max(axes) / np.float32(LARGEST[dtype]) for x in (data.k, data.v)]
    pool.set_kv_buffer(0, np.arange(KEYS), data.k, data.v, *given)
    codes = [x.astype(np.float64)[:, 0] for x in pool.get_kv_buffer(0)]
    if of_tokens:
        kept = pool.get_key_scale_buffer(0), pool.get_value_scale_buffer(0)
        factors = [scale.astype(np.float64)[..., None] for scale in kept]
    else:
        factors = [np.atleast_1d(x).astype(np.float64)[:, None] for x in given] or [1.0, 1.0]
    return codes[0] * factors[0], codes[1] * factors[1]


def error_of(data: Data, truth: Array, dtype: str, scales: str) -> Error:
    off = attended(data, *as_kept(data, dtype, scales)) - truth
    size = np.sqrt(np.mean(truth**2))
    return Error(float(np.sqrt(np.mean(off**2)) / size), float(np.abs(off).max() / size))


def formats() -> Iterator[tuple[str, str]]:
    """A dtype, and what has a scale of its own."""
    yield "bfloat16", "none"
    for dtype in LARGEST:
        if dtype != "int8":
            yield dtype, "none"
        yield from ((dtype, scales) for scales in ("tensor", "head"))
        kinds = ("float32", "float16", "bfloat16") if dtype == "int8" else ("float16",)
        yield from ((dtype, f"token and head, {kind}") for kind in kinds)


def errors() -> dict[tuple[str, str], tuple[Error, Error]]:
    """By dtype and scales: with normal data, and with heavy channels."""
    data = normal_data(), heavy_data()
    truths = [attended(each, each.k, each.v) for each in data]
    return {
        format: tuple(  # type: ignore[misc]
            error_of(each, truth, *format) for each, truth in zip(data, truths, strict=True)
        )
        for format in formats()
    }


def row_bytes(dtype: str, scales: str) -> int:
    """Of a key of one head and token."""
    width = {"bfloat16": 2, "float16": 2, "float32": 4}
    return DIM * width.get(dtype, 1) + width.get(scales.rpartition(", ")[2], 0)


def percent(error: float) -> str:
    return f"{100 * error:.2f} %" if error < 0.1 else f"{100 * error:.1f} %"


def table() -> str:
    lines = [
        "| Codes | A scale for each | Bytes | Normal: mean | largest | Heavy channels: mean | "
        "largest |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for (dtype, scales), found in errors().items():
        cells = [percent(error) for pair in found for error in pair]
        name, of = NAMES.get(dtype, dtype), "(no scale)" if scales == "none" else scales
        lines.append(f"| {name} | {of} | {row_bytes(dtype, scales)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page with the errors of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args(arguments).check
    text = PAGE.read_text()
    wanted = with_table(text)
    if check and wanted != text:
        print(f"{PAGE.name}: out of date; run python scripts/kv_8bit_errors.py")
        return 1
    if not check:
        PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
