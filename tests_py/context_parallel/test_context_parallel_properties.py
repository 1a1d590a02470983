# SPDX-License-Identifier: Apache-2.0
"""Guarantees of every plan: for small batches, and by Hypothesis for others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn import build_cp_metadata_all_ranks
from support.examples import examples

STRATEGIES = ("zigzag", "interleave", "contiguous")
SMALL_CP_SIZES = (1, 2, 3, 5, 8)


def owners(extend, cp_size, strategy):
    """The rank of every token of the batch, from the definition of the strategy alone."""
    if strategy == "interleave":
        return np.arange(sum(extend)) % cp_size
    ranks = []
    for length in extend:
        if strategy == "zigzag":
            blocks = np.array_split(np.empty(length), 2 * cp_size)
            sizes = [len(block) for block in blocks]
            ranks.append(np.repeat([*range(cp_size), *reversed(range(cp_size))], sizes))
        else:
            ends = [length * (rank + 1) // cp_size for rank in range(cp_size)]
            ranks.append(np.repeat(np.arange(cp_size), np.diff(ends, prepend=0)))
    return np.concatenate(ranks)


def check_plan(extend, cached, cp_size, strategy, padding=0, convention="baked"):
    """All properties of the plans of all ranks; returns the plans."""
    plans = build_cp_metadata_all_ranks(
        extend,
        [p + n for p, n in zip(cached, extend, strict=True)],
        cp_size=cp_size,
        strategy=strategy,
        num_tokens=sum(extend) + padding,
        kv_len_convention=convention,
    )
    lens = np.array(extend)
    lens[-1] += padding
    starts = np.concatenate([[0], np.cumsum(lens)])
    total = starts[-1]

    owned = [plan.local_q_indices for plan in plans]
    assert np.array_equal(np.sort(np.concatenate(owned)), np.arange(total))
    by_definition = owners(lens, cp_size, strategy)
    for plan, indices in zip(plans, owned, strict=True):
        assert (by_definition[indices] == plan.cp_rank).all()
        assert len(indices) == plan.per_rank_actual_token[plan.cp_rank]
        sequence = np.searchsorted(starts, indices, side="right") - 1
        assert np.array_equal(plan.query_request_indices, sequence)
        seen = np.array(cached, dtype=np.int64)[sequence] + indices - starts[sequence] + 1
        assert np.array_equal(plan.query_cache_lengths, seen)
        if strategy != "interleave":
            assert np.array_equal(visible_by_fields(plan), seen)
    tokens = np.arange(total) * 3 + 1
    assert np.array_equal(plans[-1].unshard([plan.shard(tokens) for plan in plans]), tokens)
    if strategy != "interleave":
        check_block_lists(plans[0])
    return plans


def visible_by_fields(plan):
    """Keys that each local query sees under a causal mask aligned at the end of kv_len."""
    offset = 0 if plan.kv_len_convention == "baked" else np.array(plan.prefix_lens)
    seen = []
    for half in ("prev", "next"):
        q_lens = np.array(getattr(plan, f"actual_seq_q_{half}_list"), dtype=np.int64)
        if len(q_lens):
            first = getattr(plan, f"kv_len_{half}_tensor") + offset - q_lens
            seen += [p + 1 + np.arange(n) for p, n in zip(first, q_lens, strict=True)]
    return np.concatenate(seen)


def check_block_lists(plan):
    order = np.array(plan.cp_reverse_index)
    assert np.array_equal(np.sort(order), np.arange(len(order)))
    assert np.array_equal(np.array(plan.reverse_split_len)[order], plan.split_list)
    assert sum(plan.split_list) == plan.total_seq_lens


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", SMALL_CP_SIZES)
def test_scenario_02_03_13_21_small_batches(cp_size, strategy):
    for length in (0, 1, 2 * cp_size - 1, 2 * cp_size, 2 * cp_size + 1):
        check_plan([length], [5], cp_size, strategy, convention="bare")
        check_plan([length, 0, 3], [4, 2, 0], cp_size, strategy)
        check_plan([1, length], [0, 9], cp_size, strategy, padding=cp_size + 1)


lengths = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 1_000_000)), min_size=1, max_size=8
)


@settings(max_examples=examples(150), deadline=None)
@given(
    lengths,
    st.integers(1, 40),
    st.sampled_from(STRATEGIES),
    st.integers(0, 100),
    st.sampled_from(["baked", "bare"]),
)
def test_any_batch(lens, cp_size, strategy, padding, convention):
    extend, cached = map(list, zip(*lens, strict=True))
    check_plan(extend, cached, cp_size, strategy, padding, convention)
