# SPDX-License-Identifier: Apache-2.0
"""Halos and changes of the layout, run over simulated ranks against one process."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from cpattn.context_parallel.halo import plan_halo, plan_pending, plan_relayout
from cpattn.context_parallel.vllm_0_32 import build_pcp_layout
from support.examples import examples

STRATEGIES = ("zigzag", "interleave", "contiguous")
BATCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=5)


def metadata_of(batch, **options):
    extends, prefixes = zip(*batch, strict=True)
    seq_lens = [new + old for new, old in batch]
    return extends, prefixes, cpattn.build_cp_metadata_all_ranks(extends, seq_lens, **options)


def ranks_of(batch, cp_size, options):
    """Return the arguments of plans on each rank, and its rows, each as (request, position)."""
    extends, prefixes = zip(*batch, strict=True)
    rows = [(r, old + i) for r, (new, old) in enumerate(batch) for i in range(new)]
    rows = np.array(rows, int).reshape(-1, 2)
    numbers = np.arange(len(rows))
    if "pcp_size" in options:
        layout = build_pcp_layout(extends, prefixes, **options)
        counts = layout.per_rank_num_tokens
        tokens = [layout.shard(numbers, rank)[:count] for rank, count in enumerate(counts)]
        ranks = [{"metadata": layout, "rank": rank} for rank in range(cp_size)]
    else:
        _, _, metadata = metadata_of(batch, cp_size=cp_size, **options)
        tokens = [one.shard(numbers) for one in metadata]
        ranks = [{"metadata": one} for one in metadata]
    return ranks, [rows[of_rank] for of_rank in tokens]


def exchanged(plans, rows):
    """Return the rows that each rank receives from all_to_all_single, in rank order."""
    parts = [
        np.split(own[plan.send_indices], np.cumsum(plan.send_counts)[:-1])
        for plan, own in zip(plans, rows, strict=True)
    ]
    for to, plan in enumerate(plans):
        assert [len(part[to]) for part in parts] == plan.recv_counts
    return [np.concatenate([part[to] for part in parts]) for to in range(len(plans))]


@settings(max_examples=examples(200), deadline=None)
@given(BATCHES, st.integers(1, 7), st.integers(1, 9), st.integers(0, 30), st.data())
def test_every_unit_is_computed_once_of_all_its_rows(batch, cp_size, ratio, more, data):
    options = data.draw(
        st.sampled_from(
            [{"strategy": "zigzag"}, {"strategy": "contiguous"}, {"strategy": "interleave"},
             {"weights": [r + 1.0 for r in range(cp_size)]}, {"pcp_size": cp_size},
             {"strategy": "contiguous", "weights": [cp_size - r + 0.0 for r in range(cp_size)]}]
        )
    )  # fmt: skip
    window, prefixes = ratio + more, [old for _, old in batch]
    ranks, own = ranks_of(batch, cp_size, options)
    plans = [plan_halo(window=window, ratio=ratio, **one) for one in ranks]
    computed = []
    for rank, (plan, received) in enumerate(zip(plans, exchanged(plans, own), strict=True)):
        assert plan.send_counts[rank] == plan.recv_counts[rank] == 0
        assert len(np.unique(received, axis=0)) == len(received)
        cached = np.stack([plan.cached_request, plan.cached_position], axis=1)
        assert all(position < prefixes[request] for request, position in cached)
        extended = np.concatenate([own[rank], received, cached])[plan.extended_indices]
        begins, ends = plan.extended_indptr[:-1], plan.extended_indptr[1:]
        kept = [extended[b + h : e] for b, h, e in zip(begins, plan.halo_lens, ends, strict=True)]
        assert np.array_equal(np.concatenate([*kept, own[rank][:0]]), own[rank])
        for request, begin, end in zip(plan.segment_request, begins, ends, strict=True):
            assert (extended[begin:end, 0] == request).all()
            assert (np.diff(extended[begin:end, 1]) == 1).all()
        for request, unit, start, count in zip(
            plan.unit_request, plan.unit_ids, plan.unit_starts, plan.unit_lens, strict=True
        ):
            end = (unit + 1) * ratio
            made_of = [(request, p) for p in range(max(end - window, 0), end)]
            assert extended[start : start + count].tolist() == [list(map(int, r)) for r in made_of]
            computed.append((int(request), int(unit)))
    assert sorted(computed) == [
        (r, unit)
        for r, (new, old) in enumerate(batch)
        for unit in range(old // ratio, (new + old) // ratio)
    ]


def test_no_row_is_sent_that_no_unit_needs():
    """Ranks need rows before the end of their first unit of 128 rows, and none after it."""
    (*_, metadata) = metadata_of([(1000, 0)], cp_size=4, strategy="contiguous")
    plans = [plan_halo(one, window=128, ratio=128) for one in metadata]
    assert [sum(plan.recv_counts) for plan in plans] == [0, 250 - 128, 500 - 384, 750 - 640]
    assert [plan.unit_ids.tolist() for plan in plans] == [[0], [1, 2], [3, 4], [5, 6]]


@settings(max_examples=examples(150), deadline=None)
@given(
    BATCHES, st.integers(1, 7), st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES),
    st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_any_change_of_the_layout(batch, cp_size, before, after, weighted, padding):
    tokens = np.arange(sum(new for new, _ in batch) + padding)
    options = {"cp_size": cp_size, "num_tokens": len(tokens)}
    weights = [r + 1.0 for r in range(cp_size)] if weighted and before != "interleave" else None
    _, _, source = metadata_of(batch, strategy=before, weights=weights, **options)
    _, _, target = metadata_of(batch, strategy=after, **options)
    plans = [plan_relayout(*pair) for pair in zip(source, target, strict=True)]
    received = exchanged(plans, [one.shard(tokens) for one in source])
    for plan, rows, one in zip(plans, received, target, strict=True):
        changed = np.full(len(rows), -1)
        changed[plan.recv_indices] = rows
        assert np.array_equal(changed, one.shard(tokens))


@settings(max_examples=examples(150), deadline=None)
@given(
    BATCHES, st.integers(1, 4), st.integers(1, 5), st.integers(0, 9),
    st.lists(st.integers(0, 9), min_size=2, max_size=2), st.data(),
)  # fmt: skip
def test_the_next_step_finds_its_cached_rows(batch, cp_size, ratio, more, steps, data):
    """The state after two steps has all cached rows that halos of the third step read."""
    kinds = [{"strategy": name} for name in STRATEGIES]
    options = data.draw(st.sampled_from([*kinds, {"pcp_size": cp_size, "shard_decode": False}]))
    window, states = ratio + more, [{} for _ in range(cp_size)]
    ranks_or_all = st.lists(st.integers(-1, cp_size - 1), min_size=5, max_size=5)
    keepers = data.draw(st.none() | ranks_or_all.map(lambda ranks: ranks[: len(batch)]))
    kept_by = np.full(len(batch), -1) if keepers is None else np.array(keepers)
    batch = [(new + old, 0) for new, old in batch]
    for new in steps:
        ranks, rows = ranks_of(batch, cp_size, options)
        rule = {"window": window, "ratio": ratio, "keepers": keepers}
        plans = [plan_pending(**rule, **one) for one in ranks]
        for state, plan, came in zip(states, plans, exchanged(plans, rows), strict=True):
            state.update(zip(plan.recv_indices.tolist(), came.tolist(), strict=True))
        batch = [(new, sum(lens)) for lens in batch]
    ranks, _ = ranks_of(batch, cp_size, options)
    for rank, (one, state) in enumerate(zip(ranks, states, strict=True)):
        assert all(kept_by[row // window] in (-1, rank) for row in state)
        halo = plan_halo(window=window, ratio=ratio, **one)
        for request, p in np.stack([halo.cached_request, halo.cached_position], axis=1).tolist():
            if kept_by[request] in (-1, rank):
                assert state[request * window + p % window] == [request, p]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be >= ratio = 1 and fit into int32, got 0"),
        ({"window": 2**31}, "window must be >= ratio = 1 and fit into int32, got 2147483648"),
        ({"window": 4, "ratio": 0}, "ratio must be >= 1 and fit into int32, got 0"),
    ],
)
def test_errors_of_halos(options, message):
    metadata = cpattn.build_cp_metadata([8], cp_rank=0, cp_size=2)
    with pytest.raises(ValueError, match=re.escape(f"plan_halo: {message}")):
        plan_halo(metadata, **options)


def test_each_rank_computes_all_units_of_a_request_that_it_has_whole():
    layout = build_pcp_layout([3, 16], [5, 0], pcp_size=2, dcp_size=2)  # three tokens, four chunks
    for rank in range(2):
        plan = plan_halo(layout, window=4, ratio=4, rank=rank)
        mine = plan.unit_request == 0
        assert plan.unit_ids[mine].tolist() == [1]
        assert plan.cached_position.tolist() == [4]


def test_a_layout_needs_a_rank_and_metadata_has_one():
    layout = build_pcp_layout([8], [0], pcp_size=2)
    metadata = cpattn.build_cp_metadata([8], cp_rank=0, cp_size=2)
    for rows, rank, message in (
        (layout, None, "rank must be given for a PCPLayout, got None"),
        (layout, 2, "rank must be in [0, 2), got 2"),
        (metadata, 1, "rank must be that of metadata, 0, or None, got 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"plan_halo: {message}")):
            plan_halo(rows, window=2, rank=rank)


def test_layouts_of_a_change_are_of_one_batch_and_rank():
    source = cpattn.build_cp_metadata([8], cp_rank=0, cp_size=2)
    other = cpattn.build_cp_metadata([8], cp_rank=1, cp_size=2)
    message = "plan_relayout: target must be of rank 0 of 2, as source, got 1 of 2"
    with pytest.raises(ValueError, match=message):
        plan_relayout(source, other)
    message = "plan_relayout: target must have the lengths and prefixes of source, got others"
    for lens in ([[9]], [[8], [13]]):
        with pytest.raises(ValueError, match=message):
            plan_relayout(source, cpattn.build_cp_metadata(*lens, cp_rank=0, cp_size=2))
    for function in (lambda: plan_halo(3, window=2), lambda: plan_relayout(source, None)):
        with pytest.raises(TypeError, match="must be of type ContextParallelMetadata, got"):
            function()
