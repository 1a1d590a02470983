# SPDX-License-Identifier: Apache-2.0
"""ForwardMode, the gates of context parallelism, and arguments that metadata refuse."""

import re

import numpy as np
import pytest

from cpattn import ForwardMode, build_cp_metadata, build_cp_metadata_all_ranks, can_apply_cp
from cpattn.sparse import can_dsa_prefill_cp_interleave

EXTEND, DECODE, MIXED, IDLE, VERIFY, DRAFT_V2, PREBUILT, SPLIT, DLLM = ForwardMode

PREDICATES = {
    "is_extend": {EXTEND, MIXED, VERIFY, SPLIT, DLLM},
    "is_prefill": {EXTEND, MIXED, VERIFY, SPLIT, DLLM},
    "is_context_parallel_extend": {EXTEND, MIXED},
    "is_extend_without_speculative": {EXTEND, MIXED, SPLIT, DLLM},
    "is_extend_or_draft_extend_or_mixed": {EXTEND, MIXED, SPLIT},
    "is_decode_or_idle": {DECODE, IDLE},
    "is_cpu_graph": {DECODE},
    "is_cuda_graph": {DECODE, IDLE, VERIFY, DLLM},
    "is_decode": {DECODE},
    "is_mixed": {MIXED},
    "is_idle": {IDLE},
    "is_target_verify": {VERIFY},
    "is_draft_extend_v2": {DRAFT_V2},
    "is_prebuilt": {PREBUILT},
    "is_split_prefill": {SPLIT},
    "is_dllm_extend": {DLLM},
}


def test_modes_are_numbered_as_in_engines():
    names = "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL"
    assert [mode.name for mode in ForwardMode] == [*names.split(), "DLLM_EXTEND"]
    assert list(ForwardMode) == list(range(1, 10))


@pytest.mark.parametrize("predicate", PREDICATES)
def test_predicates(predicate):
    holds = {mode for mode in ForwardMode if getattr(mode, predicate)()}
    assert holds == PREDICATES[predicate]


@pytest.mark.parametrize("predicate", ["is_extend", "is_prefill", "is_context_parallel_extend"])
def test_predicates_that_may_include_draft_extend_v2(predicate):
    holds = {m for m in ForwardMode if getattr(m, predicate)(include_draft_extend_v2=True)}
    assert holds == PREDICATES[predicate] | {DRAFT_V2}


@pytest.mark.parametrize(
    ("strategy", "extend", "allowed"),
    [
        *[("zigzag", [8], True), ("zigzag", [7], False), ("zigzag", [100, 7], False)],
        *[("zigzag", [8, 8], True), ("in-seq-split", [7], False), ("contiguous", [4], True)],
        *[("contiguous", [100, 3], False), ("interleave", [4], True), ("interleave", [3], False)],
        *[("interleave", [1, 1, 1, 1], True), ("interleave", [4, 0], True)],
        *[("zigzag", [8, 0], False)],
    ],
)
def test_can_apply_cp_needs_enough_tokens(strategy, extend, allowed):
    assert can_apply_cp(extend, cp_size=4, strategy=strategy) is allowed


@pytest.mark.parametrize("strategy", ["zigzag", "interleave", "contiguous"])
def test_can_apply_cp_needs_a_splittable_mode(strategy):
    allowed = {
        m for m in ForwardMode if can_apply_cp([64], cp_size=2, strategy=strategy, forward_mode=m)
    }
    assert allowed == {EXTEND, MIXED}
    without_mode = can_apply_cp([64], cp_size=2, strategy=strategy, forward_mode=None)
    assert without_mode is (strategy != "interleave")


def test_can_apply_cp_compares_num_tokens():
    assert not can_apply_cp([8], cp_size=4, num_tokens=7)
    assert not can_apply_cp([8], cp_size=4, num_tokens=3, strategy="contiguous")
    assert can_apply_cp([8], cp_size=4, num_tokens=4, strategy="contiguous")
    assert can_apply_cp([8], cp_size=4, num_tokens=0, strategy="interleave")


@pytest.mark.parametrize("mode", [*ForwardMode, None])
@pytest.mark.parametrize("strategy", ["zigzag", "round-robin-split", "contiguous"])
def test_the_gate_of_dsa_is_that_of_interleave_for_a_given_mode(strategy, mode):
    for extend, cp_size in (([4], 4), ([1, 2, 1], 4), ([5], 4), ([3], 4), ([9], 1)):
        given = {"cp_size": cp_size, "strategy": strategy, "forward_mode": mode}
        expected = can_apply_cp(extend, **given) and strategy == "round-robin-split"
        assert can_dsa_prefill_cp_interleave(extend, **given) == (expected and mode is not None)


INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extend_lens": [3, -1]}, "extend_lens must be ... and fit into int32, got -1 at index 1"),
        ({"extend_lens": []}, "extend_lens must hold at least one sequence, got none"),
        (
            {"extend_lens": np.ones((2, 2), np.int32)},
            "extend_lens must have 1 dimension(s), got shape [2, 2]",
        ),
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
        ({"strategy": "x" * 10_000}, "strategy must be a name, got a str of 10000 bytes"),
        ({"strategy": "dual_chunk_swap"}, "strategy must be .* got 'dual_chunk_swap'"),
        ({"forward_mode": 10}, "forward_mode must be a ForwardMode, got 10"),
    ],
)
@pytest.mark.parametrize("gate", [can_apply_cp, can_dsa_prefill_cp_interleave])
def test_gates_check_their_input(gate, arguments, message):
    given = {"extend_lens": [8], "cp_size": 2, "strategy": "interleave", "forward_mode": 1}
    with pytest.raises(ValueError, match=f"{gate.__name__}: .*{message}"):
        gate(**given | arguments)
