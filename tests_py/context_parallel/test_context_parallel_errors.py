# SPDX-License-Identifier: Apache-2.0
"""Bad input to the metadata functions: refused, with the argument, the rule, value and position."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cpattn import build_cp_metadata, build_cp_metadata_all_ranks, can_apply_cp
from cpattn.sparse import can_dsa_prefill_cp_interleave

INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extend_lens": [3, -1]}, "extend_lens must be ... and fit into int32, got -1 at index 1"),
        ({"extend_lens": []}, "extend_lens must hold at least one sequence, got none"),
        ({"extend_lens": None}, "extend_lens must be given unless compat is true"),
        ({"extend_lens": None, "compat": True}, "one of extend_lens, ... num_tokens must be given"),
        ({"seq_lens": [3, INT32_MAX + 1]}, "prefix + extend ... int32, got 2147483648 at index 1"),
        ({"extend_lens": [INT32_MAX, 1]}, "prefix + extend ... int32, got 2147483648 at index 1"),
        ({"extend_lens": [1], "seq_lens": [INT32_MAX], "num_tokens": 2}, "num_tokens, ... got 2"),
        ({"num_tokens": 2**31}, "num_tokens, and the last sequence padded to it, must fit"),
        ({"extend_lens": [0] * 32768, "cp_size": 32768}, "the number of ... int32, got 2147483648"),
        ({"strategy": "ring"}, "strategy must be ... or 'contiguous', got 'ring'"),
        ({"kv_len_convention": "raw"}, "kv_len_convention must be 'baked' or 'bare', got 'raw'"),
    ],
)
def test_value_errors(arguments, message):
    arguments = {"extend_lens": [3, 4], "cp_size": 2} | arguments
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"build_cp_metadata: {message}"):
        build_cp_metadata(**arguments, cp_rank=0)
    with pytest.raises(ValueError, match=f"build_cp_metadata_all_ranks: {message}"):
        build_cp_metadata_all_ranks(**arguments)


def test_index_arrays_have_one_dimension():
    with pytest.raises(ValueError, match=r"extend_lens must have 1 dimension\(s\), got shape"):
        build_cp_metadata(np.ones((2, 2), dtype=np.int32), cp_rank=0, cp_size=2)


def test_the_largest_lengths_pass():
    plan = build_cp_metadata([INT32_MAX - 1], cp_rank=1, cp_size=2)
    assert plan.kv_len_next_list == [3 * 2**29 - 1]
    assert plan.total_q_prev_tokens + plan.total_q_next_tokens == plan.per_rank_actual_token[1]
    for strategy in ("zigzag", "interleave", "contiguous"):
        plan = build_cp_metadata([1], [INT32_MAX], cp_rank=0, cp_size=1, strategy=strategy)
        assert plan.query_cache_lengths.tolist() == [INT32_MAX]


def test_running_sums_beyond_int32_are_none():
    plan = build_cp_metadata([1, 1], [INT32_MAX, 9], cp_rank=0, cp_size=2)
    assert plan.kv_len_prev_list == [INT32_MAX, 9]
    assert plan.cu_seqlens_kv_prev_tensor is None
    assert plan.cu_seqlens_kv_combined_tensor is None
    assert plan.cu_seqlens_q_combined_tensor.tolist() == [0, 1, 2, 2, 2]
    alone = build_cp_metadata([1], [INT32_MAX], cp_rank=0, cp_size=2)
    assert alone.cu_seqlens_kv_prev_tensor.tolist() == [0, INT32_MAX]
    assert alone.cu_seqlens_kv_next_tensor.tolist() == [0, INT32_MAX]
    assert alone.cu_seqlens_kv_combined_tensor is None


def test_physical_rows_beyond_int32():
    plan = build_cp_metadata([INT32_MAX], cp_rank=0, cp_size=1)
    with pytest.raises(ValueError, match=r"pad_to_physical: .* must fit .* got 2147483647"):
        plan.pad_to_physical()


def test_per_request_rows_are_for_interleave_only():
    plan = build_cp_metadata([8], cp_rank=0, cp_size=2)
    for call in (plan.rows_per_request, plan.shard_per_request):
        with pytest.raises(
            ValueError, match="rows_per_request: strategy must be 'interleave', got 'zigzag'"
        ):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extend_lens": [2**31]}, "fit into int32, got 2147483648 at index 0"),
        ({"strategy": "ring"}, "strategy must be 'zigzag'"),
        ({"strategy": "dual_chunk_swap"}, "strategy must be .* got 'dual_chunk_swap'"),
        ({"forward_mode": 10}, "forward_mode must be a ForwardMode, got 10"),
    ],
)
@pytest.mark.parametrize("gate", [can_apply_cp, can_dsa_prefill_cp_interleave])
def test_gates_check_their_input(gate, arguments, message):
    arguments = {
        "extend_lens": [8],
        "cp_size": 2,
        "strategy": "interleave",
        "forward_mode": 1,
    } | arguments
    with pytest.raises(ValueError, match=f"{gate.__name__}: .*{message}"):
        gate(**arguments)
