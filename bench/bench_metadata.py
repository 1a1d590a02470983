# SPDX-License-Identifier: Apache-2.0
"""Context-parallel metadata: cpattn against what the engine computes in Python.

Built as an engine builds it in every forward pass, then read: all arrays, or all lists.
The peer for arrays makes the tensors that the engine makes, the peer for lists does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import cpattn
import sglang_metadata
from cpattn import torch_guard
from harness import Suite

if message := torch_guard.prepare():
    print(message)
import torch

LISTS = (
    "split_list",
    "zigzag_index",
    "cp_reverse_index",
    "reverse_split_len",
    "per_rank_actual_token",
    "max_rank_len",
    *(f"{name}_{half}_list" for name in ("kv_len", "actual_seq_q") for half in ("prev", "next")),
)
ARRAYS = tuple(
    f"{name}_{half}_tensor"
    for name in ("kv_len", "actual_seq_q", "cu_seqlens_q", "cu_seqlens_kv")
    for half in ("prev", "next", "combined")
)
BARS = {(1, 8): (3.0, 3.0), (256, 8): (20.0, 8.0)}  # (arrays, lists) at (batch, cp_size)


def make_lens(bs: int, cp_size: int) -> tuple[list[int], list[int]]:
    rng = random.Random(bs)
    extend_lens = [rng.randrange(2 * cp_size, 4096) for _ in range(bs)]
    return extend_lens, [n + rng.choice([0, rng.randrange(4096)]) for n in extend_lens]


def build_and_read(cp_size: int, names: tuple[str, ...]) -> Callable[..., list[Any]]:
    def run(extend_lens: list[int], seq_lens: list[int]) -> list[Any]:
        plan = cpattn.build_cp_metadata(extend_lens, seq_lens, cp_rank=1, cp_size=cp_size)
        return [getattr(plan, name) for name in names]

    return run


def build_lists_in_python(cp_size: int) -> Callable[..., list[Any]]:
    def run(extend_lens: list[int], seq_lens: list[int]) -> list[Any]:
        fields = sglang_metadata.zigzag(
            sum(extend_lens), seq_lens, extend_lens, cp_rank=1, cp_size=cp_size
        )
        return [fields[name if name in fields else name.removesuffix("_list")] for name in LISTS]

    return run


def build_tensors_in_python(cp_size: int) -> Callable[..., list[Any]]:
    def run(extend_lens: list[int], seq_lens: list[int]) -> list[Any]:
        fields = sglang_metadata.zigzag(
            sum(extend_lens), seq_lens, extend_lens, cp_rank=1, cp_size=cp_size
        )
        fields = sglang_metadata.as_tensors(fields, torch)
        return [fields[name] for name in ARRAYS]

    return run


def assert_same(result: list[Any], expected: list[Any]) -> None:
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def main() -> int:
    suite = Suite("metadata", "Zigzag metadata of one rank: build and read")
    full = [(bs, cp_size) for cp_size in (8, 64) for bs in (1, 16, 256, 1024, 4096)]
    flat: dict[tuple[int, str], dict[int, float]] = {}
    for bs, cp_size in suite.cases(full, quick=[(1, 8), (16, 8)]):
        lens = make_lens(bs, cp_size)
        array_bar, list_bar = BARS.get((bs, cp_size), (None, None))
        for kind, names, peer, bar in (
            ("arrays", ARRAYS, build_tensors_in_python(cp_size), array_bar),
            ("lists", LISTS, build_lists_in_python(cp_size), list_bar),
        ):
            timings = suite.compare(
                {"read": kind, "cp": cp_size, "batch": bs},
                {"cpattn": build_and_read(cp_size, names), "python": peer},
                lambda lens=lens: lens,
                assert_same=assert_same,
                bar=bar,
            )
            flat.setdefault((cp_size, kind), {})[bs] = timings["cpattn"].minimum / bs
    status = suite.finish()
    for (cp_size, kind), per_sequence in flat.items():
        costs = ", ".join(f"{1e9 * cost:.0f} ns at {bs}" for bs, cost in per_sequence.items())
        print(f"cp {cp_size}, {kind}, per sequence: {costs}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
