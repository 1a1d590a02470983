# SPDX-License-Identifier: Apache-2.0
"""Bugs of sparse attention in sglang, reproduced by a switch in the test; the library is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cpattn
from cpattn import ForwardMode, TopkTransformMethod

TOPK, PAGE_SIZE, NUM_PAGES = 8, 4, 40
_RNG = np.random.default_rng(11)
INDEX_K = _RNG.standard_normal((NUM_PAGES * PAGE_SIZE, 1, 32), np.float32)


def queries(rows: int) -> tuple[Any, Any]:
    """Of the indexer [rows, 4, 32], and its weights [rows, 4]."""
    rng = np.random.default_rng(rows)
    return rng.standard_normal((rows, 4, 32), np.float32), rng.standard_normal(
        (rows, 4), np.float32
    )


def slots_of(page_table: list[int], length: int) -> Any:
    position = np.arange(length)
    return np.array(page_table)[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def scores_of(index_q: Any, weights: Any, slots: Any) -> Any:
    """float64 [len(slots)] of one query."""
    products = np.maximum(INDEX_K[slots, 0].astype(float) @ index_q.T.astype(float), 0)
    return products @ weights.astype(float)


def expected_slots(index_q: Any, weights: Any, slots: Any) -> Any:
    return np.sort(slots[np.argsort(-scores_of(index_q, weights, slots), kind="stable")[:TOPK]])


@pytest.mark.parametrize("forget_prefix", [False, True])
def test_23268_a_prefix_forgotten_under_context_parallelism(forget_prefix: bool) -> None:
    """Key lengths of the new tokens alone: queries saw the start of the prefix, and no more.

    https://github.com/sgl-project/sglang/pull/23268
    """
    prefix, extend, table = 37, 16, list(range(20, 3, -1))
    index_q, weights = queries(extend)
    lens = [extend], [extend if forget_prefix else prefix + extend]
    ranks = cpattn.build_cp_metadata_all_ranks(*lens, cp_size=2)
    options = {"block_tables": [table], "page_size": PAGE_SIZE, "topk": TOPK}
    parts = [
        cpattn.sparse.cp_indexer_topk(
            rank.shard(index_q), INDEX_K, rank.shard(weights), rank, **options
        )
        for rank in ranks
    ]
    slots = slots_of(table, prefix + extend)
    chosen = ranks[0].unshard(parts)
    chosen = np.where(chosen >= 0, slots[chosen], -1)
    seen = [slots[: prefix + i + 1] for i in range(extend)]
    expected = np.array([expected_slots(*row) for row in zip(index_q, weights, seen, strict=True)])
    same = (np.sort(chosen, axis=1) == expected).all(axis=1)
    assert not same.any() if forget_prefix else same.all()


def method_before_20606(forward_mode: ForwardMode, fp8: bool, impl: str) -> TopkTransformMethod:
    ragged = fp8 and impl == "flashmla_sparse"
    return TopkTransformMethod.RAGGED if ragged else TopkTransformMethod.PAGED


def new_method(forward_mode: ForwardMode, fp8: bool, impl: str) -> TopkTransformMethod:
    return cpattn.get_topk_transform_method(forward_mode, fp8_kv_cache=fp8, prefill_impl=impl)


@pytest.mark.parametrize("choose", [new_method, method_before_20606])
def test_20606_a_decode_batch_that_chose_ragged_indices(choose: Any) -> None:
    """Rows of a concatenation that a decode batch does not have, and no offsets into it.

    https://github.com/sgl-project/sglang/pull/20606
    """
    lengths, tables = [29, 18], [list(range(9, 17)), list(range(30, 22, -1))]
    index_q, weights = queries(2)
    slots = [slots_of(*pair) for pair in zip(tables, lengths, strict=True)]
    rows = list(zip(index_q, weights, slots, strict=True))
    logits = np.full((2, max(lengths)), -np.inf, np.float32)
    for row, length, inputs in zip(logits, lengths, rows, strict=True):
        row[:length] = scores_of(*inputs)
    method = choose(ForwardMode.DECODE, True, "flashmla_sparse")
    page_table = np.stack([slots_of(table, 32) for table in tables]).astype(np.int32)
    arguments = {"method": method, "lengths": lengths, "page_table": page_table}
    expected = np.array([expected_slots(*row) for row in rows])
    if choose is new_method:
        chosen = cpattn.sparse.topk_transform(logits, TOPK, **arguments)
        np.testing.assert_array_equal(np.sort(chosen, axis=1), expected)
        return
    message = "^RAGGED topk_transform requires topk_indices_offset; expected extend-without-specul"
    with pytest.raises(RuntimeError, match=message):
        cpattn.sparse.topk_transform(logits, TOPK, **arguments)
    # What the offsets of an extend of these sequences would have given: rows of other tokens.
    offsets = [0, lengths[0]]
    chosen = cpattn.sparse.topk_transform(logits, TOPK, topk_indices_offset=offsets, **arguments)
    assert not (np.sort(chosen, axis=1) == expected).any()
