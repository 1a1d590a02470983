# SPDX-License-Identifier: Apache-2.0
"""Placements of sharded pools and sequences: a bijection, in the words of their formulas."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.kv import PageInterleave, Placement, TokenInterleave
from support.examples import examples


def by_pages(shard_size: int, run: int) -> PageInterleave:
    return PageInterleave(shard_size=shard_size, page_size=run)


def by_tokens(shard_size: int, run: int) -> TokenInterleave:
    return TokenInterleave(shard_size=shard_size, interleave=run)


MAKERS = [by_pages, by_tokens]
SIZES = [(shard_size, run) for shard_size in range(1, 6) for run in range(1, 5)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("shard_size", "run"), SIZES)
def test_every_index_has_one_place_and_every_place_one_index(make, shard_size, run):
    placement: Placement = make(shard_size, run)
    num_runs = 3 * shard_size
    indices = np.arange(num_runs * run)
    owners, local = placement.owner_of(indices), placement.local_index(indices)
    assert owners.dtype == local.dtype == np.int64
    places = list(zip(owners.tolist(), local.tolist(), strict=True))
    assert sorted(places) == [(r, i) for r in range(shard_size) for i in range(3 * run)]
    for rank in range(shard_size):
        mine, rows = placement.filter_local(indices, rank)
        assert mine.dtype == rows.dtype == np.int64
        assert mine.tolist() == [x for x in indices.tolist() if owners[x] == rank]
        assert rows.tolist() == list(range(3 * run))
        np.testing.assert_array_equal(placement.global_index(rank, rows), mine)


def test_pages_go_to_the_ranks_in_turn():
    """Slot x of sglang 0.5.23, in its own arithmetic."""
    for shard_size, page_size in SIZES:
        placement = by_pages(shard_size, page_size)
        for loc in range(5 * shard_size * page_size):
            span = shard_size * page_size
            assert placement.owner_of([loc]) == loc % span // page_size
            assert placement.local_index([loc]) == loc // span * page_size + loc % page_size


def test_positions_go_to_the_ranks_in_turn():
    """As vLLM's block tables compute the slot of a position, and its lengths of each rank."""
    for shard_size, run in SIZES:
        placement = by_tokens(shard_size, run)
        for position in range(5 * shard_size * run):
            assert placement.owner_of([position]) == position // run % shard_size
            local = position // (shard_size * run) * run + position % run
            assert placement.local_index([position]) == local
        for rank in range(shard_size):
            lens = np.arange(4 * shard_size * run)
            base = lens // run // shard_size * run
            rest = np.clip(lens - base * shard_size - rank * run, 0, run)
            np.testing.assert_array_equal(placement.local_lens(lens, rank), base + rest)


@st.composite
def lists(draw: st.DrawFn) -> list[int]:
    """Runs that ascend, far indices and padding, in any order."""
    parts = draw(
        st.lists(
            st.one_of(
                st.tuples(st.integers(0, 400), st.integers(1, 9)).map(
                    lambda run: list(range(run[0], run[0] + run[1]))
                ),
                st.sampled_from([[-1], [0], [2**40], [2**63 - 1]]),
            ),
            max_size=8,
        )
    )
    return [x for part in parts for x in part]


@settings(max_examples=examples(200), deadline=None)
@given(make=st.sampled_from(MAKERS), size=st.sampled_from([*SIZES, (16, 64)]), indices=lists())
def test_lists_in_any_order(make, size, indices):
    placement, (shard_size, run) = make(*size), size
    owners = [x // run % shard_size if x >= 0 else -1 for x in indices]
    local = [x // run // shard_size * run + x % run if x >= 0 else -1 for x in indices]
    assert placement.owner_of(indices).tolist() == owners
    assert placement.local_index(indices).tolist() == local
    seen = []
    for rank in range(shard_size):
        positions, rows = placement.filter_local(indices, rank)
        assert positions.tolist() == [i for i, owner in enumerate(owners) if owner == rank]
        assert rows.tolist() == [local[i] for i in positions]
        seen += positions.tolist()
        near = [i for i in positions if indices[i] < 2**62]
        again = placement.global_index(rank, [local[i] for i in near])
        assert again.tolist() == [indices[i] for i in near]
    assert sorted(seen) == [i for i, x in enumerate(indices) if x >= 0]


def test_one_rank_changes_nothing():
    for placement in (by_pages(1, 16), by_tokens(1, 4)):
        indices = [5, 3, -1, 0, 2**63 - 1]
        assert placement.local_index(indices).tolist() == indices
        assert placement.global_index(0, indices).tolist() == indices
        positions, local = placement.filter_local(indices, 0)
        assert positions.tolist() == [0, 1, 3, 4]
        assert local.tolist() == [5, 3, 0, 2**63 - 1]
    assert by_tokens(1, 4).local_lens([0, 7], 0).tolist() == [0, 7]


def test_padding_with_slot_0_is_written_by_rank_0():
    placement = by_pages(4, 2)
    assert placement.filter_local([0, 11, 0], 0)[0].tolist() == [0, 2]
    assert placement.filter_local([0, 11, 0], 0)[1].tolist() == [0, 0]
    assert [len(placement.filter_local([0, -1], rank)[0]) for rank in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize(("shard_size", "page_size"), SIZES)
def test_rows_that_a_rank_needs(shard_size, page_size):
    placement = by_pages(shard_size, page_size)
    for num_slots in range(3 * shard_size * page_size + 1):
        num_pages = -(-num_slots // page_size)
        assert placement.num_local_slots(num_slots) == -(-num_pages // shard_size) * page_size


@pytest.mark.parametrize("make", MAKERS)
def test_placements_are_values(make):
    placement = make(4, 16)
    assert placement == make(np.int32(4), np.int64(16))
    assert type(make(np.int32(4), 16).shard_size) is int
    assert len({placement, make(4, 16), make(4, 8), make(2, 16)}) == 3
    assert by_pages(4, 16) != by_tokens(4, 16)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(placement, protocol))
        assert again == placement
        assert hash(again) == hash(placement)
        assert again.owner_of([16]).tolist() == [1]
    assert copy.deepcopy(placement) == copy.copy(placement) == placement
    assert eval(repr(placement)) == placement
    with pytest.raises(FrozenInstanceError):
        placement.shard_size = 2


def test_representations():
    assert repr(by_pages(4, 16)) == "PageInterleave(shard_size=4, page_size=16)"
    assert repr(by_tokens(2, 1)) == "TokenInterleave(shard_size=2, interleave=1)"


def test_sizes_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        PageInterleave(4, 16)
    with pytest.raises(TypeError, match="positional"):
        TokenInterleave(4, 16)


ANY: Any = PageInterleave(shard_size=2, page_size=4)
TOKENS: Any = TokenInterleave(shard_size=2, interleave=4)
PADDED = "must be >= 0, or -1 for padding, got -2 at index 1"
REFUSALS = {
    "PageInterleave: shard_size must be in [1, 32768], got 0": lambda: by_pages(0, 4),
    "PageInterleave: shard_size must be in [1, 32768], got 32769": lambda: by_pages(32769, 4),
    "PageInterleave: page_size must be in [1, 2147483647], got 0": lambda: by_pages(2, 0),
    "PageInterleave: page_size must be in [1, 2147483647], got 2147483648":
        lambda: by_pages(2, 2**31),
    "PageInterleave: page_size must fit into int64, got 1180591620717411303424":
        lambda: by_pages(2, 2**70),
    "TokenInterleave: shard_size must be in [1, 32768], got -1": lambda: by_tokens(-1, 4),
    "TokenInterleave: interleave must be in [1, 2147483647], got 0": lambda: by_tokens(2, 0),
    f"PageInterleave.owner_of: slots {PADDED}": lambda: ANY.owner_of([0, -2]),
    f"PageInterleave.local_index: slots {PADDED}": lambda: ANY.local_index([0, -2]),
    f"PageInterleave.filter_local: slots {PADDED}": lambda: ANY.filter_local([0, -2], 0),
    "PageInterleave.filter_local: rank must be in [0, 2), got 2": lambda: ANY.filter_local([], 2),
    "PageInterleave.global_index: rank must be in [0, 2), got -1": lambda: ANY.global_index(-1, []),
    "PageInterleave.global_index: local must be in [0, 4611686018427387903], or -1 for padding, "
    "got 4611686018427387904 at index 0": lambda: ANY.global_index(0, [2**62]),
    "PageInterleave.num_local_slots: num_slots must be >= 0, got -1":
        lambda: ANY.num_local_slots(-1),
    f"TokenInterleave.owner_of: positions {PADDED}": lambda: TOKENS.owner_of([0, -2]),
    f"TokenInterleave.local_index: positions {PADDED}": lambda: TOKENS.local_index([0, -2]),
    f"TokenInterleave.filter_local: positions {PADDED}": lambda: TOKENS.filter_local([0, -2], 0),
    "TokenInterleave.filter_local: rank must be in [0, 2), got 2":
        lambda: TOKENS.filter_local([], 2),
    "TokenInterleave.global_index: rank must be in [0, 2), got 2":
        lambda: TOKENS.global_index(2, []),
    "TokenInterleave.global_index: local must be in [0, 4611686018427387903], or -1 for padding, "
    "got -2 at index 0": lambda: TOKENS.global_index(0, [-2]),
    "TokenInterleave.local_lens: seq_lens must be >= 0, got -1 at index 1":
        lambda: TOKENS.local_lens([3, -1], 0),
    "TokenInterleave.local_lens: rank must be in [0, 2), got 2": lambda: TOKENS.local_lens([3], 2),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_out_of_bounds_is_refused(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        REFUSALS[message]()


TYPES = {
    "PageInterleave: shard_size must be an integer, got float": lambda: by_pages(2.0, 4),
    "PageInterleave: page_size must be an integer, got bool": lambda: by_pages(2, True),
    "TokenInterleave: interleave must be an integer, got str": lambda: by_tokens(2, "4"),
    "PageInterleave.owner_of: slots must be int32 or int64, got float64":
        lambda: ANY.owner_of(np.zeros(2)),
    "PageInterleave.filter_local: rank must be an integer, got NoneType":
        lambda: ANY.filter_local([1], None),
    "TokenInterleave.local_index: positions must be a list or tuple of int, or a NumPy or torch "
    "CPU array of int32 or int64, got int": lambda: TOKENS.local_index(3),
}  # fmt: skip


@pytest.mark.parametrize("message", TYPES)
def test_other_types_are_refused(message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        TYPES[message]()
