# SPDX-License-Identifier: Apache-2.0
"""Plans over sharded pools, with the calls of a rank, and the merge of partial results.

The peer lists the rows that a rank holds token by token, like engines in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import cpattn
from bench.harness import accuracy
from bench.harness.comparison import Bar, Comparison, Wrong, equal, microseconds
from cpattn.distributed.plans.plan import make_plan
from cpattn.distributed.plans.sequence_call import SequenceCall
from cpattn.distributed.plans.sharded_plan import ShardedPlan, make_decode_plan, shard_plan
from cpattn.kv import TokenInterleave

OURS, PEER, COPY = "cpattn", "NumPy, by tokens", "copy of the parts"
RANKS = 8
PLACEMENT = TokenInterleave(shard_size=RANKS, interleave=1)
Ints = NDArray[np.int64]


def comparisons(quick: bool) -> Iterator[Comparison]:
    sequences, keys = (8, 4096) if quick else (64, 32768)
    for page_size in (64,) if quick else (16, 64, 256):
        yield of_decode(sequences, keys, page_size)
    yield of_prefill(*((2, 512, 4096) if quick else (4, 8192, 98304)))
    for rows in (1, 64 if quick else 4096):
        yield of_merge(8, rows)


def of_decode(sequences: int, keys: int, page_size: int) -> Comparison:
    lens = np.full(sequences, keys)
    tables = random_tables(sequences, keys, page_size)

    def ours() -> Any:
        plan = make_decode_plan(
            lens, q_lens=None, block_tables=tables, page_size=page_size, placement=PLACEMENT,
            cp_rank=0, custom_mask=None, packed_custom_mask=None,
        )  # fmt: skip
        return plan.batch.call(0, slice(0, sequences), causal=True, window=None)

    case = {"plan": "decode", "keys": keys, "page": page_size, "batch": sequences, "cp": RANKS}
    return planned(case, ours, tables, lens, page_size, microseconds(OURS, 150))


def of_prefill(sequences: int, new: int, cached: int) -> Comparison:
    page_size = 64
    extends, lens = [new] * sequences, np.full(sequences, new + cached)
    tables = random_tables(sequences, new + cached, page_size)

    def ours() -> ShardedPlan:
        metadata = cpattn.build_cp_metadata(extends, lens, cp_rank=0, cp_size=RANKS)
        plan = make_plan(
            metadata, extends, block_tables=tables, out_cache_loc=None, page_size=page_size,
            pad_to_physical=False,
        )  # fmt: skip
        return shard_plan(plan, placement=PLACEMENT, exchange="auto", max_scratch_bytes=1 << 28)

    case = {"plan": "prefill", "new": new, "cached": cached, "batch": sequences, "cp": RANKS}
    return planned(case, ours, tables, lens, page_size, microseconds(OURS, 100))


def planned(
    case: dict[str, Any],
    ours: Callable[[], Any],
    tables: NDArray[np.int32],
    lens: Ints,
    page_size: int,
    bar: Bar,
) -> Comparison:
    def theirs() -> list[Ints]:
        return [
            rows_of_tokens(table, length, page_size)
            for table, length in zip(tables, lens, strict=True)
        ]

    expected = theirs()
    return Comparison(
        "plans", case, {OURS: ours, PEER: theirs},
        equal(assert_same_rows, expected),
        work=None, items=(int(lens.sum()), "key"), bars=(bar,),
    )  # fmt: skip


def of_merge(num_parts: int, rows: int) -> Comparison:
    outs = torch.randn(rows, num_parts, 32, 128).to(torch.bfloat16)
    lses = torch.randn(rows, num_parts, 32)
    weights = torch.softmax(lses.double(), 1)[..., None]
    expected = (weights * outs.double()).sum(1)

    def check(name: str, result: Any) -> float:
        if name == COPY:
            return 0.0
        error = (result[0].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        if not error.max() <= accuracy.attention("bfloat16", "cpattn", None):
            raise Wrong(f"relative error {float(error.max()):.2g}")
        return float(error.max())

    bar = () if rows > 1 else (microseconds(OURS, 5),)
    return Comparison(
        "plans", {"merge": f"{num_parts} parts, bfloat16", "rows": rows, "heads": 32, "dim": 128},
        {OURS: lambda: cpattn.merge_states(outs, lses), COPY: outs.clone},
        check, work=(outs.nbytes / 1e9, "GB"), items=(rows, "row"), bars=bar,
    )  # fmt: skip


def random_tables(sequences: int, keys: int, page_size: int) -> NDArray[np.int32]:
    pages = -(-keys // page_size)
    ids = np.random.default_rng(0).permutation(sequences * pages)
    return ids.astype(np.int32).reshape(sequences, pages)


def rows_of_tokens(table: NDArray[np.int32], length: int, page_size: int) -> Ints:
    """Return the rows of rank 0's pool that hold keys of a sequence, in their order."""
    slots = (table[:, None] * page_size + np.arange(page_size)).ravel()[:length]
    rows: Ints = PLACEMENT.local_index(slots[PLACEMENT.owner_of(slots) == 0])
    return rows


def assert_same_rows(result: Any, expected: list[Ints]) -> None:
    if isinstance(result, ShardedPlan):
        keys = result.batch.shares.local_keys(0)
        result = [keys.row[keys.request == i] for i in range(len(expected))]
    elif isinstance(result, SequenceCall):
        call, ends = result, result.kv_indptr[1:]
        pages = np.split(call.kv_indices, ends[:-1])
        counts = (np.diff(call.kv_indptr) - 1) * call.page_size + call.last_page_len
        result = [
            (ids[:, None] * call.page_size + np.arange(call.page_size)).ravel()[:count]
            for ids, count in zip(pages, counts, strict=True)
        ]
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
