# SPDX-License-Identifier: Apache-2.0
"""Metadata of one rank, built like an engine's in every forward pass, then read.

All arrays, or all lists. The peer for arrays makes the tensors that the engine makes, the peer for
lists does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import cpattn
from bench.context_parallel import sglang_metadata
from bench.harness.comparison import Comparison, equal, times_as_fast

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
CP_RANK = 1
OURS, PEER = "cpattn", "python"
BARS = {(1, 8): (3.0, 3.0), (256, 8): (20.0, 8.0)}  # (arrays, lists) at (batch, cp_size)


def comparisons(quick: bool) -> Iterator[Comparison]:
    full = [(bs, cp_size) for cp_size in (8, 64) for bs in (1, 16, 256, 1024, 4096)]
    for bs, cp_size in [(1, 8), (16, 8)] if quick else full:
        array_bar, list_bar = BARS.get((bs, cp_size), (None, None))
        yield of_batch("arrays", ARRAYS, bs, cp_size, in_tensors, array_bar)
        yield of_batch("lists", LISTS, bs, cp_size, in_lists, list_bar)


def of_batch(
    kind: str,
    names: tuple[str, ...],
    bs: int,
    cp_size: int,
    in_python: Callable[..., list[Any]],
    at_least: float | None,
) -> Comparison:
    rng = random.Random(bs)
    extend_lens = [rng.randrange(2 * cp_size, 4096) for _ in range(bs)]
    seq_lens = [n + rng.choice([0, rng.randrange(4096)]) for n in extend_lens]

    def ours() -> list[Any]:
        plan = cpattn.build_cp_metadata(extend_lens, seq_lens, cp_rank=CP_RANK, cp_size=cp_size)
        return [getattr(plan, name) for name in names]

    def theirs() -> list[Any]:
        return in_python(extend_lens, seq_lens, cp_size)

    return Comparison(
        "metadata",
        {"read": kind, "cp": cp_size, "batch": bs},
        {OURS: ours, PEER: theirs},
        equal(assert_same, theirs()),
        work=None,
        items=(bs, "sequence"),
        bars=(times_as_fast(OURS, PEER, at_least, PEER),) if at_least else (),
    )


def in_lists(extend_lens: list[int], seq_lens: list[int], cp_size: int) -> list[Any]:
    fields = zigzag(extend_lens, seq_lens, cp_size)
    return [fields[name if name in fields else name.removesuffix("_list")] for name in LISTS]


def in_tensors(extend_lens: list[int], seq_lens: list[int], cp_size: int) -> list[Any]:
    fields = sglang_metadata.as_tensors(zigzag(extend_lens, seq_lens, cp_size), torch)
    return [fields[name] for name in ARRAYS]


def zigzag(extend_lens: list[int], seq_lens: list[int], cp_size: int) -> sglang_metadata.Fields:
    return sglang_metadata.zigzag(
        sum(extend_lens), seq_lens, extend_lens, cp_rank=CP_RANK, cp_size=cp_size
    )


def assert_same(result: list[Any], expected: list[Any]) -> None:
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
