# SPDX-License-Identifier: Apache-2.0
"""Placements of sharded pools and sequences from Python: values, results, and what they refuse.

`tests_cpp/kv/placement_test.cc` has all places of all sizes.
"""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError
from itertools import product
from typing import Any

import numpy as np
import pytest

from cpattn.kv import PageInterleave, TokenInterleave


def by_pages(shard_size: int, run: int) -> PageInterleave:
    return PageInterleave(shard_size=shard_size, page_size=run)


def by_tokens(shard_size: int, run: int) -> TokenInterleave:
    return TokenInterleave(shard_size=shard_size, interleave=run)


MAKERS = [by_pages, by_tokens]


def test_rows_of_pools_are_whole_pages():
    for shard_size, run in product(range(1, 6), range(1, 5)):
        for num_slots in range(3 * shard_size * run + 1):
            num_pages = -(-num_slots // run)
            expected = -(-num_pages // shard_size) * run
            assert by_pages(shard_size, run).num_local_slots(num_slots) == expected


@pytest.mark.parametrize("make", MAKERS)
def test_places_of_indices(make):
    """Indices may be in any order, far, or padding, in runs of four over two ranks."""
    placement = make(2, 4)
    indices = [0, 3, 4, 9, -1, 13, 2**40 + 5]
    owners, local = placement.owner_of(indices), placement.local_index(indices)
    assert owners.tolist() == [0, 0, 1, 0, -1, 1, 1]
    assert local.tolist() == [0, 3, 0, 5, -1, 5, 2**39 + 1]
    positions, rows = placement.filter_local(indices, 1)
    assert positions.tolist() == [2, 5, 6]
    assert rows.tolist() == [0, 5, 2**39 + 1]
    assert placement.global_index(1, [*rows, -1]).tolist() == [4, 13, 2**40 + 5, -1]
    assert {array.dtype for array in (owners, local, positions, rows)} == {np.dtype(np.int64)}


def test_lengths_of_ranks():
    placement, lens = by_tokens(2, 4), [0, 3, 6, 13]
    assert placement.local_lens(lens, 0).tolist() == [0, 3, 4, 8]
    assert placement.local_lens(lens, 1).tolist() == [0, 0, 2, 5]
    table = np.array(lens, np.int32).reshape(2, 2).T
    assert placement.local_lens(table, 1).tolist() == [[0, 2], [0, 5]]


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
    (lambda: by_pages(2, 2**70), "PageInterleave: page_size must fit into int64, got 118059162071"),
    (lambda: by_tokens(-1, 4), "TokenInterleave: shard_size must be in [1, 32768], got -1"),
    (lambda: PAGES.global_index(0, [2**62]), f"PageInterleave.{LOCAL} {2**62} at index 0"),
    (lambda: PAGES.num_local_slots(-1), "PageInterleave.num_local_slots: num_slots must be >= 0,"),
    (lambda: TOKENS.local_lens([3, -1], 0), "TokenInterleave.local_lens: seq_lens must be >= 0, g"),
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
