# SPDX-License-Identifier: Apache-2.0
"""Placements of sharded pools and sequences, in the words of their formulas."""

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

from cpattn.kv import PageInterleave, TokenInterleave
from support.examples import examples


def by_pages(shard_size: int, run: int) -> PageInterleave:
    return PageInterleave(shard_size=shard_size, page_size=run)


def by_tokens(shard_size: int, run: int) -> TokenInterleave:
    return TokenInterleave(shard_size=shard_size, interleave=run)


MAKERS = [by_pages, by_tokens]
SIZES = [(shard_size, run) for shard_size in range(1, 6) for run in range(1, 5)]


@pytest.mark.parametrize(("shard_size", "run"), SIZES)
def test_sizes_of_ranks(shard_size, run):
    """Lengths as vLLM computes them, and rows of a pool in whole pages."""
    lens = np.arange(4 * shard_size * run)
    for rank in range(shard_size):
        base = lens // run // shard_size * run
        rest = np.clip(lens - base * shard_size - rank * run, 0, run)
        got = by_tokens(shard_size, run).local_lens(lens, rank)
        np.testing.assert_array_equal(got, base + rest)
    for num_slots in range(3 * shard_size * run + 1):
        num_pages = -(-num_slots // run)
        expected = -(-num_pages // shard_size) * run
        assert by_pages(shard_size, run).num_local_slots(num_slots) == expected


RUNS = st.tuples(st.integers(0, 400), st.integers(1, 9)).map(lambda x: [*range(x[0], sum(x))])
FAR = st.sampled_from([[-1], [0], [2**40], [2**63 - 1]])
LISTS = st.lists(RUNS | FAR, max_size=8).map(lambda parts: [x for part in parts for x in part])


@settings(max_examples=examples(200), deadline=None)
@given(make=st.sampled_from(MAKERS), size=st.sampled_from([*SIZES, (16, 64)]), indices=LISTS)
def test_lists_in_any_order(make, size, indices):
    """Runs that ascend, far indices and padding: each index has one place, and each place one."""
    placement, (shard_size, run) = make(*size), size
    owners = [x // run % shard_size if x >= 0 else -1 for x in indices]
    local = [x // run // shard_size * run + x % run if x >= 0 else -1 for x in indices]
    assert placement.owner_of(indices).tolist() == owners
    assert placement.local_index(indices).tolist() == local
    assert placement.owner_of(indices).dtype == placement.local_index(indices).dtype == np.int64
    for rank in range(shard_size):
        positions, rows = placement.filter_local(indices, rank)
        assert positions.dtype == rows.dtype == np.int64
        assert positions.tolist() == [i for i, owner in enumerate(owners) if owner == rank]
        assert rows.tolist() == [local[i] for i in positions]
        near = [i for i in positions if indices[i] < 2**62]
        again = placement.global_index(rank, [local[i] for i in near] + [-1])
        assert again.tolist() == [indices[i] for i in near] + [-1]


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
    assert copy.deepcopy(placement) == copy.copy(placement) == eval(repr(placement)) == placement
    with pytest.raises(FrozenInstanceError):
        placement.shard_size = 2
    with pytest.raises(TypeError, match="positional"):
        type(placement)(4, 16)


def test_representations():
    assert repr(by_pages(4, 16)) == "PageInterleave(shard_size=4, page_size=16)"
    assert repr(by_tokens(2, 1)) == "TokenInterleave(shard_size=2, interleave=1)"


PAGES: Any = by_pages(2, 4)
TOKENS: Any = by_tokens(2, 4)
LOCAL = "global_index: local must be in [0, 4611686018427387903], or -1 for padding, got"
REFUSALS = [
    (lambda: by_pages(0, 4), "PageInterleave: shard_size must be in [1, 32768], got 0"),
    (lambda: by_pages(32769, 4), "PageInterleave: shard_size must be in [1, 32768], got 32769"),
    (lambda: by_pages(2, 0), "PageInterleave: page_size must be in [1, 2147483647], got 0"),
    (lambda: by_pages(2, 2**31), "PageInterleave: page_size must be in [1, 2147483647], got 21474"),
    (lambda: by_pages(2, 2**70), "PageInterleave: page_size must fit into int64, got 118059162071"),
    (lambda: by_tokens(-1, 4), "TokenInterleave: shard_size must be in [1, 32768], got -1"),
    (lambda: by_tokens(2, 0), "TokenInterleave: interleave must be in [1, 2147483647], got 0"),
    (lambda: PAGES.global_index(0, [2**62]), f"PageInterleave.{LOCAL} {2**62} at index 0"),
    (lambda: TOKENS.global_index(0, [-2]), f"TokenInterleave.{LOCAL} -2 at index 0"),
    (lambda: PAGES.global_index(-1, []), "PageInterleave.global_index: rank must be in [0, 2), go"),
    (lambda: PAGES.num_local_slots(-1), "PageInterleave.num_local_slots: num_slots must be >= 0,"),
    (lambda: TOKENS.local_lens([3, -1], 0), "TokenInterleave.local_lens: seq_lens must be >= 0, g"),
    (lambda: TOKENS.local_lens([3], 2), "TokenInterleave.local_lens: rank must be in [0, 2), got"),
    *(
        (lambda x=x: x.filter_local([], 2), f"{name}.filter_local: rank must be in [0, 2), got 2")
        for x, name in ((PAGES, "PageInterleave"), (TOKENS, "TokenInterleave"))
    ),
    *(
        (lambda call=call: call([0, -2], *[0] * (call.__name__ == "filter_local")),
         f"{call.__qualname__}: {what} must be >= 0, or -1 for padding, got -2 at index 1")
        for x, what in ((PAGES, "slots"), (TOKENS, "positions"))
        for call in (x.owner_of, x.local_index, x.filter_local)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_is_out_of_bounds_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


TYPES = [
    (lambda: by_pages(2.0, 4), "PageInterleave: shard_size must be an integer, got float"),
    (lambda: by_pages(2, True), "PageInterleave: page_size must be an integer, got bool"),
    (lambda: by_tokens(2, "4"), "TokenInterleave: interleave must be an integer, got str"),
    (lambda: PAGES.owner_of(np.zeros(2)), "PageInterleave.owner_of: slots must be int32 or int64,"),
    (lambda: PAGES.filter_local([1], None), "PageInterleave.filter_local: rank must be an integer"),
    (lambda: TOKENS.local_index(3), "TokenInterleave.local_index: positions must be a list or tup"),
]


@pytest.mark.parametrize(("call", "message"), TYPES)
def test_other_types_are_refused(call, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        call()
