# SPDX-License-Identifier: Apache-2.0
"""Splits in proportion to weights of ranks, cut at pages."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from cpattn import build_cp_metadata_all_ranks
from support.examples import examples

STRATEGIES = ("zigzag", "contiguous")
INTERLEAVE = {"strategy": "interleave"}
OTHER = "must be None unless strategy is 'zigzag' or 'contiguous', got 'interleave'"
EXTENDS, PREFIXES = [700, 3, 0, 256], [130, 0, 9, 64]


def lens(extends, prefixes):
    return extends, [new + old for new, old in zip(extends, prefixes, strict=True)]


def pairs_of(plan):
    return int(plan.query_cache_lengths.sum(dtype=np.int64))


batches = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 900)), min_size=1, max_size=7)


@settings(max_examples=examples(200), deadline=None)
@given(
    batches,
    st.lists(st.floats(0.05, 20), min_size=1, max_size=9),
    st.sampled_from(STRATEGIES),
    st.data(),
)
def test_any_split(batch, weights, strategy, data):
    extends, prefixes = map(list, zip(*batch, strict=True))
    pages = [-(-(p + n) // 16) - p // 16 for n, p in batch if n]
    page_size = data.draw(st.sampled_from([None, 1, 16] if sum(pages) >= len(weights) else [None]))
    if page_size == 1 and sum(extends) < len(weights):
        page_size = None
    plans = build_cp_metadata_all_ranks(
        *lens(extends, prefixes), cp_size=len(weights), strategy=strategy, weights=weights,
        page_size=page_size,
    )  # fmt: skip
    tokens = np.arange(sum(extends))
    parts = [plan.shard(tokens) for plan in plans]
    assert np.array_equal(np.sort(np.concatenate(parts)), tokens)
    assert np.array_equal(plans[0].unshard(parts), tokens)
    begins, owner = np.cumsum([0, *extends]), np.zeros(len(tokens), int)
    for plan, part in zip(plans, parts, strict=True):
        owner[part] = plan.cp_rank
        request = np.searchsorted(begins, part, side="right") - 1
        position = part - begins[request] + np.array(prefixes, int)[request]
        assert np.array_equal(plan.query_request_indices, request)
        assert np.array_equal(plan.query_cache_lengths, position + 1)
    for begin, new, old in zip(begins[:-1], extends, prefixes, strict=True):
        cuts = np.flatnonzero(np.diff(owner[begin : begin + new])) + 1 + old
        assert (cuts % (page_size or 1) == 0).all()
    pairs, shares = np.array([pairs_of(plan) for plan in plans]), np.array(weights) / sum(weights)
    assert plans[0].per_rank_pairs == pairs.tolist()
    unit = (page_size or 1) * max(n + p for n, p in batch)
    assert (abs(pairs - pairs.sum() * shares) <= 2 * unit + 1).all()
    worst = (pairs / pairs.sum() / shares).max() if pairs.sum() else 1
    assert plans[0].imbalance == pytest.approx(worst)


@given(batches, st.integers(1, 9))
def test_pairs_of_tokens_in_turns(batch, cp_size):
    plans = build_cp_metadata_all_ranks(
        *lens(*zip(*batch, strict=True)), cp_size=cp_size, strategy="interleave"
    )
    assert plans[0].per_rank_pairs == [pairs_of(plan) for plan in plans]


def test_pages_alone_give_all_ranks_equal_weights():
    options = {"cp_size": 4, "page_size": 32}
    alone, equal = (
        build_cp_metadata_all_ranks(*lens(EXTENDS, PREFIXES), **options, **weights)
        for weights in ({}, {"weights": [2.0] * 4})
    )
    assert [plan.split_list for plan in alone] == [plan.split_list for plan in equal]
    assert alone[0].weights is None
    assert (equal[0].weights, equal[0].page_size) == ([2.0] * 4, 32)
    assert alone != equal


@pytest.mark.parametrize(
    ("weights", "tokens"),
    [([1e-300, 5e-324], 65536), ([1e308, 1e308], 32768), (np.float32([3, 1]), 49152)],
)
def test_only_proportions_of_weights_count(weights, tokens):
    (plan, _) = build_cp_metadata_all_ranks([65536], cp_size=2, weights=weights)
    assert plan.per_rank_actual_token == [tokens, 65536 - tokens]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1, 0]}, "weights must be finite and > 0, got 0 at index 1"),
        ({"weights": [-1.5, 1]}, "weights must be finite and > 0, got -1.5 at index 0"),
        ({"weights": [1, float("nan")]}, "weights must be finite and > 0, got nan at index 1"),
        ({"weights": [1, float("inf")]}, "weights must be finite and > 0, got inf at index 1"),
        ({"weights": [1, 2, 3]}, "weights must have cp_size = 2 values, got 3"),
        ({"page_size": 0}, "page_size must be >= 1 and fit into int32, got 0"),
        ({"page_size": 2**31}, "page_size must be >= 1 and fit into int32, got 2147483648"),
        (
            {"page_size": 4},
            "page_size must leave at least cp_size = 2 pages with new tokens, got 1 of 4",
        ),
        ({"weights": [1, 1]} | INTERLEAVE, f"weights {OTHER}"),
        ({"page_size": 4} | INTERLEAVE, f"page_size {OTHER}"),
    ],
)
def test_value_errors(arguments, message):
    with pytest.raises(ValueError, match=re.escape(f"build_cp_metadata_all_ranks: {message}")):
        build_cp_metadata_all_ranks([3], [4], cp_size=2, **arguments)
    with pytest.raises(ValueError, match=re.escape(f"build_cp_metadata: {message}")):
        cpattn.build_cp_metadata([3], [4], cp_rank=0, cp_size=2, **arguments)


@pytest.mark.parametrize("weights", [3, "12", ["1", 2], [True, 2], np.array([1, 2]), [[1, 2]]])
def test_weights_are_floats(weights):
    with pytest.raises(TypeError, match="build_cp_metadata_all_ranks: weights must be"):
        build_cp_metadata_all_ranks([30], cp_size=2, weights=weights)
