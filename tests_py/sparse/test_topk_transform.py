# SPDX-License-Identifier: Apache-2.0
"""topk_transform, the choice of its method, and the unfused transforms are right."""

import itertools
import re

import numpy as np
import pytest
import torch

from cpattn import ForwardMode, TopkTransformMethod, get_topk_transform_method
from cpattn.sparse import topk_transform
from cpattn.sparse.sglang_0_5_23 import (
    fast_topk,
    fast_topk_transform_fused,
    fast_topk_transform_ragged_fused,
    pad_topk_indices,
    page_table_to_topk,
    transform_index_page_table_decode,
    transform_index_page_table_prefill,
)
from support.sparse.topk_cases import random_scores

PAGED, RAGGED = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED


PREFILL_IMPLS = (
    "aiter", "fa3", "flashinfer_sparse_mla", "flashmla_auto", "flashmla_kv", "flashmla_sparse",
    "flashmla_sparse_q8", "intel_xpu", "tilelang", "triton", "triton_sparse_mla", "trtllm",
)  # fmt: skip
# A plain extend is RAGGED for these implementations, with or without FP8; all else is PAGED.
RAGGED_EXTENDS = {
    *[("flashmla_sparse", True), ("triton_sparse_mla", True)],
    *[("flashmla_sparse_q8", True), ("flashmla_sparse_q8", False)],
}


@pytest.mark.parametrize("impl", PREFILL_IMPLS)
def test_method_of_every_combination(impl):
    for fp8, mode in itertools.product((False, True), (None, *ForwardMode)):
        chosen = get_topk_transform_method(mode, fp8_kv_cache=fp8, prefill_impl=impl)
        ragged = mode is ForwardMode.EXTEND and (impl, fp8) in RAGGED_EXTENDS
        assert chosen is (RAGGED if ragged else PAGED)


def test_methods_are_numbered_as_in_engines():
    assert (PAGED, RAGGED) == (1, 2)
    assert get_topk_transform_method(fp8_kv_cache=True, prefill_impl="flashmla_sparse") is PAGED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prefill_impl": "flashmla"},
            "prefill_impl must be one of 'aiter', 'fa3', ..., 'trtllm', got 'flashmla'",
        ),
        ({"forward_mode": 10}, "forward_mode must be a ForwardMode, got 10"),
    ],
)
def test_unknown_modes_and_implementations_are_refused(arguments, message):
    arguments = {"fp8_kv_cache": True, "prefill_impl": "flashmla_sparse"} | arguments
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"get_topk_transform_method: {message}"):
        get_topk_transform_method(**arguments)


LENGTHS, ROW_STARTS = [90, 4, 70, 100], [0, 0, 20, 0]
SCORE = random_scores(4, 100)
TABLE = np.random.default_rng(2).permutation(300).reshape(3, 100).astype(np.int32)


def test_paged():
    result = topk_transform(
        SCORE, 16, method=PAGED, lengths=LENGTHS, page_table=TABLE, cu_seqlens_q=[0, 2, 2, 4],
        row_starts=ROW_STARTS,
    )  # fmt: skip
    expected = fast_topk_transform_fused(SCORE, LENGTHS, TABLE, [0, 2, 2, 4], 16, ROW_STARTS)
    np.testing.assert_array_equal(result, expected)


def test_paged_selects_rows_of_the_table():
    by_sequence = topk_transform(
        SCORE, 16, method=PAGED, lengths=LENGTHS, page_table=TABLE, cu_seqlens_q=[0, 1, 4],
        batch_idx_list=[2, 0],
    )  # fmt: skip
    np.testing.assert_array_equal(
        by_sequence, fast_topk_transform_fused(SCORE, LENGTHS, TABLE[[2, 0]], [0, 1, 4], 16)
    )
    by_token = topk_transform(
        SCORE, 16, method=PAGED, lengths=LENGTHS, page_table=TABLE, batch_idx_list=[2, 0, 0, 0]
    )
    np.testing.assert_array_equal(by_token, by_sequence)


def test_ragged():
    result = topk_transform(
        SCORE, 16, method=RAGGED, lengths=LENGTHS, topk_indices_offset=[5, 5, 9, 9],
        row_starts=ROW_STARTS, page_table=TABLE, cu_seqlens_q=[0, 2, 2, 4], sorted=False,
    )  # fmt: skip
    expected = fast_topk_transform_ragged_fused(
        SCORE, LENGTHS, [5, 5, 9, 9], 16, ROW_STARTS, sorted=False
    )
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("more", [{}, {"page_table": TABLE, "cu_seqlens_q": [0, 2, 2, 4]}])
def test_ragged_without_offsets_is_the_error_that_engines_know(more):
    message = (
        "RAGGED topk_transform requires topk_indices_offset; expected "
        "extend-without-speculative metadata."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        topk_transform(SCORE, 16, method=RAGGED, lengths=LENGTHS, **more)


def test_no_method_is_no_transform():
    result = topk_transform(
        torch.from_numpy(SCORE), 16, method=None, lengths=LENGTHS, page_table=TABLE
    )
    assert isinstance(result, torch.Tensor)
    np.testing.assert_array_equal(result.numpy(), fast_topk(SCORE, LENGTHS, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_table": None}, "page_table must be given for PAGED"),
        ({"method": 3}, "method must be TopkTransformMethod.PAGED, RAGGED or None, got 3"),
        ({"batch_idx_list": [0, 3], "cu_seqlens_q": [0, 1, 4]}, "batch_idx_list ... 3 at index 1"),
        ({"batch_idx_list": [0, -1]}, "in [0, 3), got -1 at index 1"),
        ({"batch_idx_list": [0, 1]}, "per row of score, 4, got 2"),
        ({"lengths": [1]}, "lengths must have one element per row of score, 4, got 1"),
    ],
)
def test_errors_of_topk_transform(arguments, message):
    case = {"method": PAGED, "lengths": LENGTHS, "page_table": TABLE} | arguments
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"^topk_transform: .*{message}"):
        topk_transform(SCORE, 16, **case)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("container", [np.asarray, torch.from_numpy])
def test_unfused_equals_fused(page_size, container):
    width = -(-100 // page_size)
    pages = np.random.default_rng(3).permutation(4 * width).reshape(4, width).astype(np.int32)
    indices = container(fast_topk(SCORE, LENGTHS, 16))
    decode = transform_index_page_table_decode(container(pages), indices, page_size)
    assert type(decode) is type(indices)
    fused = fast_topk_transform_fused(SCORE, LENGTHS, pages, None, 16, page_size=page_size)
    np.testing.assert_array_equal(np.asarray(decode), fused)
    prefill = transform_index_page_table_prefill(container(pages), indices, [1, 0, 3, 0], page_size)
    fused = fast_topk_transform_fused(
        SCORE, LENGTHS, pages, [0, 1, 1, 4, 4], 16, page_size=page_size
    )
    np.testing.assert_array_equal(np.asarray(prefill), fused)


def test_invalid_entries_stay_invalid_wherever_they_are():
    slots = transform_index_page_table_decode(TABLE[:1], np.int64([[-1, 3, -7, 0]]))
    np.testing.assert_array_equal(slots, [[-1, TABLE[0, 3], -1, TABLE[0, 0]]])


def test_whole_sequences():
    result = page_table_to_topk(TABLE, [3, 0, 100], 5, num_rows=5)
    expected = np.full((5, 5), -1)
    expected[0, :3], expected[2] = TABLE[0, :3], TABLE[2, :5]
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(page_table_to_topk(TABLE, [3, -2, 9], 5), expected[:3])
    paged = page_table_to_topk(np.int32([[7, 2]]), [6], 8, page_size=4)
    np.testing.assert_array_equal(paged, [[28, 29, 30, 31, 8, 9, -1, -1]])


def test_padding_rows():
    indices = np.int32([[1, 2], [3, -1]])
    assert pad_topk_indices(indices, 2) is indices
    for given in (indices, torch.from_numpy(indices)):
        padded = pad_topk_indices(given, 4)
        assert type(padded) is type(given)
        assert padded.tolist() == [[1, 2], [3, -1], [-1, -1], [-1, -1]]
    with pytest.raises(ValueError, match=r"^pad_topk_indices: .* number of rows, 2, got 1"):
        pad_topk_indices(indices, 1)
    with pytest.raises(ValueError, match=r"^pad_topk_indices: .* 2 dimensions, got shape \[2\]"):
        pad_topk_indices(indices[0], 2)
    with pytest.raises(TypeError, match="topk_indices must be int32 or int64, got uint8"):
        pad_topk_indices(np.ones((1, 2), np.uint8), 2)


ONE_ROW = np.zeros((1, 4), np.int32)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (transform_index_page_table_decode, (TABLE, ONE_ROW), "page_table ... 1, got 3"),
        (transform_index_page_table_decode, (TABLE[:1], ONE_ROW + 100), "indices ... its row 0"),
        (
            transform_index_page_table_decode,
            (TABLE[:1], np.int64([[2**31]])),
            "topk_indices must fit into int32, got 2147483648 at [0, 0]",
        ),
        (transform_index_page_table_prefill, (TABLE, ONE_ROW, [1, 0]), "extend_lens_cpu ... got 2"),
        (transform_index_page_table_prefill, (TABLE, ONE_ROW, [0, 0, 0]), "extend_lens_cpu ... 0"),
        (transform_index_page_table_prefill, (TABLE, ONE_ROW, [0, 2, -1]), "extend_lens_cpu ... 1"),
        (page_table_to_topk, (TABLE, [1, 2], 4), "lengths must have ... of page_table, 3, got 2"),
        (page_table_to_topk, (TABLE, [1, 2, 101], 400), "got 100 for its row 2"),
        (page_table_to_topk, (TABLE, [1, 2, 3], 0), "topk must be >= 1, got 0"),
    ],
)
def test_errors_of_unfused_transforms(function, arguments, message):
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"^{function.__name__}: .*{message}"):
        function(*arguments)


def test_whole_sequences_need_a_row_each():
    for few in (2, -3):
        message = f"page_table_to_topk: num_rows must be at least that of page_table, 3, got {few}"
        with pytest.raises(ValueError, match=message):
            page_table_to_topk(TABLE, [1, 2, 3], 4, num_rows=few)
    nothing = torch.zeros(0, 2, dtype=torch.int32)
    with pytest.raises(MemoryError, match="page_table_to_topk: no memory for a result of shape"):
        page_table_to_topk(nothing, [], 2**62)
