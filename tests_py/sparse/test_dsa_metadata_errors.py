# SPDX-License-Identifier: Apache-2.0
"""Refusals of build_dsa_metadata, and what it need not refuse."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cpattn import ForwardMode, build_cp_metadata
from cpattn.sparse import build_dsa_metadata
from support.sparse.topk_cases import PAGED, RAGGED


def test_sums_beyond_int32_are_none():
    large = 2**31 - 1
    batch = build_dsa_metadata([3], [large], forward_mode=ForwardMode.EXTEND, topk=large, **PAGED)
    assert batch.ke.tolist() == [large - 2, large - 1, large]
    assert batch.dsa_cu_seqlens_k is None


CP = build_cp_metadata([3, 2], [10, 4], cp_rank=0, cp_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extend_lens": None}, "extend_lens must be given in this mode"),
        (
            {"extend_lens": None, "forward_mode": ForwardMode.TARGET_VERIFY},
            "extend_lens must be given in this mode, or num_draft_tokens",
        ),
        ({"num_draft_tokens": 4}, "num_draft_tokens is for ... batches, instead of extend_lens"),
        (
            {"extend_lens": None, "num_draft_tokens": 0, "forward_mode": ForwardMode.TARGET_VERIFY},
            "num_draft_tokens must be >= 1, got 0",
        ),
        ({"extend_lens": [3]}, "extend_lens must have as many elements as seq_lens, 2, got 1"),
        ({"forward_mode": ForwardMode.DECODE}, "extend_lens must be 1 in decode, got 3 at index 0"),
        ({"extend_lens": [3, -1]}, "extend_lens must be ... and fit into int32, got -1 at index 1"),
        ({"extend_lens": [3, 5]}, "seq_lens must be >= extend_lens, got 4 below 5 at index 1"),
        ({"seq_lens": [10, -4]}, "seq_lens must be >= 0 and fit into int32, got -4 at index 1"),
        ({"seq_lens": [2**31 - 1, 4]}, "the sums of ... must fit into int32, got 2147483651 at"),
        ({"forward_mode": ForwardMode.PREBUILT}, "forward_mode must not be PREBUILT"),
        ({"forward_mode": 10}, "forward_mode must be a ForwardMode, got 10"),
        ({"forward_mode": None}, "forward_mode must be given"),
        ({"topk": 0}, "topk must be in [1, 2147483647], got 0"),
        ({"num_rows": 4}, "num_rows must be at least the rows of q, 5, and fit into int32, got 4"),
        ({"req_to_token": np.zeros((1, 10), int)}, "req_to_token must have ... 2 sequences, got 1"),
        (
            {"req_to_token": np.zeros((1, 10), int), "req_pool_indices": [0]},
            "req_pool_indices must have a row for each of the 2 sequences, got 1",
        ),
        (
            {"req_to_token": np.zeros((1, 10), int), "req_pool_indices": [0, 1]},
            "req_pool_indices must be in [0, 1), got 1 at index 1",
        ),
        ({"req_to_token": np.zeros((2, 9), int)}, "req_to_token must have ... longest sequence, "),
        ({"req_to_token": np.array([[0] * 10, [0, -1] + [0] * 8])}, "req_to_token ... at [1, 1]"),
        ({"req_to_token": np.full((2, 10), 6), "page_size": 4}, "key 0 must ... 0 of req_to_token"),
        (
            {"req_to_token": np.array([[*range(9), 10], [0] * 10]), "page_size": 9},
            "key 9 must be the first of a page of 9, got slot 10 in row 0 of req_to_token",
        ),
        ({"cp_metadata": CP, "seq_lens": [10, 5]}, "cp_metadata must be ... got 2 + 2 at index 1"),
        ({"cp_metadata": CP, "seq_lens": [10], "extend_lens": [3]}, "cp_metadata ... got one of 2"),
        (
            {"cp_metadata": CP, "forward_mode": ForwardMode.TARGET_VERIFY},
            "cp_metadata is for EXTEND, MIXED and DRAFT_EXTEND_V2",
        ),
    ],
)
def test_errors(change, message):
    case = {
        "extend_lens": [3, 2],
        "seq_lens": [10, 4],
        "forward_mode": ForwardMode.EXTEND,
        "topk": 4,
        **RAGGED,
    } | change
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"^build_dsa_metadata: {message}"):
        build_dsa_metadata(**case)


def test_lengths_up_to_int32_are_none_too_long_alone():
    """Their sum may be too long."""
    message = "the sums of extend_lens and of seq_lens must fit into int32, got 2147483648 at"
    for extend_lens in ([2**31 - 1, 1], [1, 1]):
        with pytest.raises(ValueError, match=f"^build_dsa_metadata: {message} index 1"):
            build_dsa_metadata(
                extend_lens, [2**31 - 1, 1], forward_mode=ForwardMode.EXTEND, topk=4, **RAGGED
            )


def test_slots_beyond_a_sequence_may_be_anything_that_fits():
    table = np.array([[0, 1, 2, 3], [8, 9, -1, 7]])
    batch = build_dsa_metadata(
        [4, 2], [4, 2], forward_mode=ForwardMode.EXTEND, topk=4, **PAGED, page_size=2,
        req_to_token=table,
    )  # fmt: skip
    np.testing.assert_array_equal(batch.page_table_1, table)
    np.testing.assert_array_equal(batch.real_page_table, [[0, 1], [4, -1]])
