# SPDX-License-Identifier: Apache-2.0
"""ForwardMode and its predicates, and the gates in front of context parallelism."""

from __future__ import annotations

import pytest

from cpattn import ForwardMode, can_apply_cp
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


@pytest.mark.parametrize("strategy", ["zigzag", "interleave", "contiguous"])
def test_can_apply_cp_needs_two_ranks(strategy):
    assert not can_apply_cp([64], cp_size=1, strategy=strategy)


def test_can_apply_cp_compares_num_tokens():
    assert not can_apply_cp([8], cp_size=4, num_tokens=7)
    assert not can_apply_cp([8], cp_size=4, num_tokens=3, strategy="contiguous")
    assert can_apply_cp([8], cp_size=4, num_tokens=4, strategy="contiguous")
    assert can_apply_cp([8], cp_size=4, num_tokens=0, strategy="interleave")


@pytest.mark.parametrize(
    ("extend", "cp_size", "strategy", "mode", "allowed"),
    [
        ([4], 4, "interleave", EXTEND, True),
        ([1, 2, 1], 4, "round-robin-split", MIXED, True),
        ([5], 4, "interleave", EXTEND, True),  # need not divide
        ([3], 4, "interleave", EXTEND, False),
        ([9], 1, "interleave", EXTEND, False),
        ([9], 4, "zigzag", EXTEND, False),
        ([9], 4, "contiguous", EXTEND, False),
        ([9], 4, "interleave", DECODE, False),
        ([9], 4, "interleave", DRAFT_V2, False),
        ([9], 4, "interleave", None, False),
    ],
)
def test_can_dsa_prefill_cp_interleave(extend, cp_size, strategy, mode, allowed):
    got = can_dsa_prefill_cp_interleave(
        extend, cp_size=cp_size, strategy=strategy, forward_mode=mode
    )
    assert got is allowed
