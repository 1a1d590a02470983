# SPDX-License-Identifier: Apache-2.0
"""The allocator of striped pools from Python: results, containers, and what it refuses.

`tests_cpp/kv/striped_allocator_test.cc` has calls in any order, against lists of pages.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

from cpattn.kv import StripedAllocator


def test_pages_of_the_ranks_in_turn():
    allocator = StripedAllocator(8, page_size=2, shard_size=3)
    bases = [None, None, 5]
    slots = allocator.alloc_extend([0, 0, 2], [1, 3, 4], bases)
    assert slots.dtype == np.int64
    assert slots.tolist() == [6, 8, 9, 10, 12, 13]
    assert bases == [0, 1, 5]
    assert allocator.class_free_page_counts() == [2, 3, 3]
    assert allocator.least_full_class() == 1
    assert (allocator.available_size(), allocator.aggregate_free_size()) == (12, 16)
    assert allocator.alloc_cyclic(-2, 3).tolist() == [14, 15, 16]
    bases = [None]
    assert allocator.alloc_extend([0], [17], bases) is None
    assert bases == [0], "written although the pages are too few"
    allocator.free(slots)
    assert allocator.class_free_page_counts() == [4, 3, 3]


def test_an_allocator_says_what_it_is():
    allocator = StripedAllocator(9, page_size=4, shard_size=3, need_sort=True)
    text = "StripedAllocator(9, page_size=4, shard_size=3, need_sort=True)"
    assert repr(allocator) == text
    sizes = (allocator.size, allocator.page_size, allocator.shard_size, allocator.need_sort)
    assert sizes == (9, 4, 3, True)
    assert allocator.class_free_page_counts() == [2, 2, 2]


def test_memory_is_that_of_the_pages_in_use():
    """The pool may be as large as slots can be numbered."""
    allocator = StripedAllocator(2**60, page_size=1, shard_size=2)
    assert allocator.available_size() == 2**61
    allocator.free(allocator.alloc_cyclic(0, 10))
    assert allocator.available_size() == 2**61


def new(size: Any = 8, page_size: Any = 2, shard_size: Any = 2, **more: Any) -> StripedAllocator:
    return StripedAllocator(size, page_size=page_size, shard_size=shard_size, **more)


def extend(prefix_lens: Any, seq_lens: Any, bases: Any) -> Any:
    before = copy.copy(bases)
    allocator = new()
    try:
        return allocator.alloc_extend(prefix_lens, seq_lens, bases)
    except Exception:
        assert bases == before
        assert allocator.class_free_page_counts() == [4, 4]
        raise


EXTEND = "StripedAllocator.alloc_extend: "
REFUSALS = [
    (lambda: new(-1), "StripedAllocator: size must be >= 0, got -1"),
    (lambda: new(2**62 - 3), f"StripedAllocator: size must be at most {2**62 - 4} for slots that"),
    (lambda: new(shard_size=1), "StripedAllocator: shard_size must be >= 2, got 1: one rank share"),
    (lambda: extend([0], [1, 2], [None]), EXTEND + "seq_lens must have as many elements as prefix"),
    (lambda: extend([0], [1], []), EXTEND + "rotation_bases must have as many elements as prefix_"),
    (lambda: extend([0, -2], [1, 1], [None, None]),
     EXTEND + "prefix_lens must be >= 0 and fit into int32, got -2 at index 1"),
    (lambda: extend([2, 3], [3, 5], [None, None]),
     EXTEND + "prefix_lens must be multiples of page_size 2, got 3 at index 1"),
    (lambda: extend([0, 4], [1, 4], [None, 0]),
     EXTEND + "seq_lens must be > prefix_lens and fit into int32, got 4 behind 4 at index 1"),
    (lambda: extend([0], [2**31], [None]),
     EXTEND + f"seq_lens must be > prefix_lens and fit into int32, got {2**31} behind 0 at index"),
    (lambda: extend([0, 0], [1, 1], [None, 2**64]),
     EXTEND + f"rotation_bases must fit into int64, got {2**64} at index 1"),
    (lambda: new().alloc_cyclic(0, 0),
     "StripedAllocator.alloc_cyclic: num_slots must be in [1, 2147483647], got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_breaks_a_rule_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("bases", [(None,), [0.0]])
def test_bases_of_other_types_are_refused(bases):
    with pytest.raises(TypeError, match=f"^{EXTEND}rotation_bases must (be a list|hold integers)"):
        extend([0], [1], bases)


def test_a_list_that_changes_during_the_call_is_refused():
    bases: list[Any] = [None]

    class Shrinks:
        def __index__(self) -> int:
            bases.clear()
            return 0

    bases.append(Shrinks())
    allocator = new()
    with pytest.raises(ValueError, match="rotation_bases must not change during the call"):
        allocator.alloc_extend([0, 0], [1, 1], bases)
    assert allocator.class_free_page_counts() == [4, 4]
