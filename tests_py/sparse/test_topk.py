# SPDX-License-Identifier: Apache-2.0
"""fast_topk and its fused transforms agree with a stable sort.

`tests_cpp/sparse/topk_kernel_test.cc` has rows that mislead guesses, of all lengths around topk.
"""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.sparse.sglang_0_5_23 import (
    fast_topk,
    fast_topk_transform_fused,
    fast_topk_transform_ragged_fused,
)
from support.sparse.topk_cases import expected_topk, random_scores


def test_scores_outside_the_candidates_do_not_matter():
    score = random_scores(3, 400)
    expected = fast_topk(score, [300, 8, 300], 64, [50, 100, 99])
    score[:, :50], score[0, 350:], score[1], score[2, 399:] = np.nan, np.inf, np.nan, np.inf
    np.testing.assert_array_equal(fast_topk(score, [300, 8, 300], 64, [50, 100, 99]), expected)


@given(data=st.data())
def test_any_row(data):
    """Values are few, so that ties are everywhere."""
    values = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, np.inf, -np.inf, np.nan])
    row = data.draw(st.lists(values, min_size=1, max_size=200))
    score = np.float32([row])
    start = data.draw(st.integers(0, len(row)))
    length = data.draw(st.integers(-2, len(row) - start))
    topk = data.draw(st.integers(1, 80))
    sorted = data.draw(st.booleans())
    np.testing.assert_array_equal(
        fast_topk(score, [length], topk, [start], sorted=sorted),
        expected_topk(score, [length], topk, [start], sorted=sorted),
    )


def test_rows_may_be_parts_of_wider_ones():
    score, lengths = random_scores(2, 100), [100, 30]
    wide = np.full((2, 150), np.nan, np.float32)
    wide[:, 17:117] = score
    expected = fast_topk(score, lengths, 8)
    np.testing.assert_array_equal(fast_topk(wide[:, 17:117], lengths, 8), expected)
    assert fast_topk(score[:0], [], 8).shape == (0, 8)


def paged_case(page_size):
    """Return three sequences with a table row each, and with 2, 0 and 3 queries."""
    width = -(-200 // page_size)
    table = np.random.default_rng(1).permutation(3 * width).reshape(3, width).astype(np.int32)
    return random_scores(5, 200), [200, 37, 0, 150, 64], table, [0, 2, 2, 5], [0, 0, 2, 2, 2]


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_paged_transform(page_size, dtype):
    score, lengths, table, cu_seqlens_q, rows = paged_case(page_size)
    indices = fast_topk(score, lengths, 48)
    slots = fast_topk_transform_fused(
        score, lengths, table.astype(dtype), cu_seqlens_q, 48, page_size=page_size
    )
    expected = table[np.array(rows)[:, None], indices // page_size] * page_size
    expected = np.where(indices >= 0, expected + indices % page_size, -1)
    np.testing.assert_array_equal(slots, expected)


def test_paged_transform_of_decode_has_a_table_row_per_query():
    score, _, table, _, _ = paged_case(1)
    slots = fast_topk_transform_fused(score[:3], [200, 100, 3], table, None, 16)
    indices = fast_topk(score[:3], [200, 100, 3], 16)
    np.testing.assert_array_equal(
        slots, np.where(indices >= 0, np.take_along_axis(table, indices, 1), -1)
    )
    np.testing.assert_array_equal(
        slots, fast_topk_transform_fused(score[:3], [200, 100, 3], table, [0, 1, 2, 3], 16)
    )


def test_ragged_transform():
    score, lengths, _, _, _ = paged_case(1)
    offsets = np.int32([0, 0, 200, 200, 2**31 - 200])
    rows = fast_topk_transform_ragged_fused(score, lengths, offsets, 48)
    indices = fast_topk(score, lengths, 48)
    np.testing.assert_array_equal(rows, np.where(indices >= 0, indices + offsets[:, None], -1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk must be in [1, 268435456], got 0"),
        ({"topk": -1}, "topk must be in [1, 268435456], got -1"),
        ({"lengths": [9]}, "lengths must have one element per row of score, 2, got 1"),
        ({"row_starts": [0] * 3}, "row_starts must have one element per row of score, 2, got 3"),
        ({"row_starts": [0, -1]}, "row_starts must be in [0, 9], got -1 at index 1"),
        ({"row_starts": [0, 10]}, "row_starts must be in [0, 9], got 10 at index 1"),
        ({"lengths": [9, 8], "row_starts": [0, 2]}, "row_starts + lengths ... 2 + 8 at index 1"),
        ({"score": np.zeros((2, 18), np.float32)[:, ::2]}, "score ... dimension, got stride 2"),
    ],
)
def test_errors_of_all_selections(change, message):
    case = {
        "score": np.zeros((2, 9), np.float32),
        "lengths": [9, 9],
        "topk": 4,
        "row_starts": None,
    } | change
    score, lengths, topk, row_starts = case.values()
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"^fast_topk: {message}"):
        fast_topk(score, lengths, topk, row_starts)
    with pytest.raises(ValueError, match=f"^fast_topk_transform_fused: {message}"):
        fast_topk_transform_fused(score, lengths, [[0] * 9] * 2, None, topk, row_starts)
    with pytest.raises(ValueError, match=f"^fast_topk_transform_ragged_fused: {message}"):
        fast_topk_transform_ragged_fused(score, lengths, [0, 0], topk, row_starts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": np.zeros((2, 8), int)}, "lengths must be within the page table, 8 pages of 1, "),
        ({"cu": [0, 2]}, "cu_seqlens_q must have one element more than there are sequences, 3, "),
        ({"cu": [1, 1, 2]}, "cu_seqlens_q must begin with 0, got 1"),
        ({"cu": [0, 1, 3]}, "cu_seqlens_q must end at the number of rows, 2, got 3"),
        ({"cu": [0, 3, 2]}, "must be prefix sums, which never decrease, got 2 after 3 at index 2"),
        ({"cu": [0, -1, 2]}, "must be prefix ... which never decrease, got -1 after 0 at index 1"),
        ({"cu": None, "table": np.zeros((3, 9), int)}, "without cu_seqlens_q ... score, 2, got 3"),
        ({"table": np.array([[0] * 9, [0, -1] + [0] * 7])}, "entries of the ... got -1 at [1, 1]"),
        ({"table": np.full((2, 9), 2**31)}, "got 2147483648 at [0, 0]"),
        ({"table": np.full((2, 9), 2**25), "page_size": 64}, "got 33554432 at [0, 0]"),
        ({"page_size": 0}, "page_size must be in [1, 2147483647], got 0"),
    ],
)
def test_errors_of_the_paged_transform(change, message):
    case = {"table": np.zeros((2, 9), int), "cu": [0, 1, 2], "page_size": 1} | change
    score = np.zeros((2, 9), np.float32)
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"^fast_topk_transform_fused: .*{message}"):
        fast_topk_transform_fused(
            score, [9, 9], case["table"], case["cu"], 4, page_size=case["page_size"]
        )


def test_entries_of_the_page_table_that_are_not_selected_may_be_anything():
    table = np.array([[0, 1, -1, 2**40]])
    slots = fast_topk_transform_fused(np.float32([[3, 2, 1, 0]]), [4], table, [0, 1], 2)
    np.testing.assert_array_equal(slots, [[0, 1]])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0], "topk_indices_offset must have one element per row of score, 2, got 1"),
        ([0, -1], "topk_indices_offset must be >= 0 and .* got -1 at index 1"),
        ([0, 2**31 - 9], "offset \\+ lengths fit into int32, got 2147483639 at index 1"),
    ],
)
def test_errors_of_the_ragged_transform(offsets, message):
    with pytest.raises(ValueError, match=f"^fast_topk_transform_ragged_fused: .*{message}"):
        fast_topk_transform_ragged_fused(np.zeros((2, 9), np.float32), [9, 9], offsets, 4)
