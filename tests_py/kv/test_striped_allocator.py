# SPDX-License-Identifier: Apache-2.0
"""The allocator of striped pools against lists of pages that follow its rules word by word."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpattn.kv import StripedAllocator
from support.examples import examples


class Lists:
    """What the allocator does, on plain lists of logical pages."""

    def __init__(self, size: int, page_size: int, shard_size: int, need_sort: bool) -> None:
        self.page_size, self.shard_size, self.need_sort = page_size, shard_size, need_sort
        self.free_pages = [
            [q * shard_size + r for q in range(1, size // page_size + 1)] for r in range(shard_size)
        ]
        self.release_pages: list[list[int]] = [[] for _ in range(shard_size)]

    def counts(self) -> list[int]:
        pairs = zip(self.free_pages, self.release_pages, strict=True)
        return [len(free) + len(release) for free, release in pairs]

    def extend(
        self, prefix_lens: list[int], seq_lens: list[int], bases: list[int | None]
    ) -> list[int] | None:
        left = self.counts()
        classes = []  # of the new pages of each request, in the order of positions
        for i, (prefix, seq) in enumerate(zip(prefix_lens, seq_lens, strict=True)):
            if bases[i] is None:
                bases[i] = left.index(max(left))
            first, end = prefix // self.page_size, -(-seq // self.page_size)
            classes.append([(bases[i] + p) % self.shard_size for p in range(first, end)])
            for r in classes[-1]:
                left[r] -= 1
        if min(left) < 0:
            return None
        needs = [total - rest for total, rest in zip(self.counts(), left, strict=True)]
        if any(need > len(free) for need, free in zip(needs, self.free_pages, strict=True)):
            for r in range(self.shard_size):
                self.free_pages[r] = sorted(self.free_pages[r] + self.release_pages[r])
                self.release_pages[r] = []
        slots = []
        for prefix, seq, drawn in zip(prefix_lens, seq_lens, classes, strict=True):
            pages = [self.free_pages[r].pop(0) for r in drawn]
            tokens = [page * self.page_size + i for page in pages for i in range(self.page_size)]
            slots += tokens[: seq - prefix]
        return slots

    def free(self, slots: list[int]) -> None:
        pages = sorted({slot // self.page_size for slot in slots})
        for r in range(self.shard_size):
            freed = [page for page in pages if page % self.shard_size == r]
            if self.need_sort:
                self.release_pages[r] = freed + self.release_pages[r]
            else:
                self.free_pages[r] = freed + self.free_pages[r]


BASES = st.one_of(st.none(), st.integers(-9, 9), st.sampled_from([2**63 - 1, -(2**63)]))


class Allocations(RuleBasedStateMachine):
    """Calls in any order, on the allocator and on lists."""

    @initialize(
        pages=st.integers(0, 9), page_size=st.integers(1, 4), shard_size=st.integers(2, 5),
        need_sort=st.booleans(), more=st.integers(0, 3),
    )  # fmt: skip
    def start(
        self, pages: int, page_size: int, shard_size: int, need_sort: bool, more: int
    ) -> None:
        size = pages * page_size + min(more, page_size - 1)
        self.allocator = StripedAllocator(
            size, page_size=page_size, shard_size=shard_size, need_sort=need_sort
        )
        self.lists = Lists(size, page_size, shard_size, need_sort)
        self.page_size, self.shard_size, self.pages = page_size, shard_size, pages
        self.used: list[int] = []  # slots that were handed out, in their order

    def took(self, got: Any, expected: list[int] | None) -> None:
        if expected is None:
            assert got is None
            return
        assert got.dtype == np.int64
        assert got.tolist() == expected
        self.used += expected

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        request = st.tuples(st.integers(0, 5), st.integers(1, 4 * self.page_size + 1), BASES)
        batch = data.draw(st.lists(request, max_size=4))
        prefixes = [pages * self.page_size for pages, _, _ in batch]
        lens = [prefix + new for prefix, (_, new, _) in zip(prefixes, batch, strict=True)]
        bases, written = ([base for _, _, base in batch] for _ in range(2))
        expected = self.lists.extend(prefixes, lens, written)
        self.took(self.allocator.alloc_extend(prefixes, lens, bases), expected)
        assert bases == written

    @rule(start=st.integers(-9, 9), num_slots=st.integers(1, 20))
    def cyclic(self, start: int, num_slots: int) -> None:
        expected = self.lists.extend([0], [num_slots], [start])
        self.took(self.allocator.alloc_cyclic(start, num_slots), expected)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.used), min_size=1))
        self.allocator.free(slots)
        self.lists.free(slots)
        freed = {slot // self.page_size for slot in slots}
        self.used = [slot for slot in self.used if slot // self.page_size not in freed]

    @rule(data=st.data(), before=st.booleans())
    def free_what_is_free(self, data: st.DataObject, before: bool) -> None:
        """Beside slots that are used, which stay so."""
        end = self.shard_size * (self.pages + 1) * self.page_size
        used = {slot // self.page_size for slot in self.used}
        wrong = [slot for slot in range(-2, end + 2) if slot // self.page_size not in used]
        slot = data.draw(st.sampled_from(wrong))
        slots = [slot, *self.used] if before else [*self.used, slot]
        with pytest.raises(ValueError, match=r"^StripedAllocator.free: slots must be "):
            self.allocator.free(slots)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "allocator"):
            return
        counts = self.lists.counts()
        assert self.allocator.class_free_page_counts() == counts
        assert self.allocator.least_full_class() == counts.index(max(counts))
        span = self.shard_size * self.page_size
        assert self.allocator.available_size() == span * min(counts)
        assert self.allocator.aggregate_free_size() == self.page_size * sum(counts)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)


def test_lengths_in_every_container():
    expected = StripedAllocator(8, page_size=2, shard_size=2).alloc_extend([0, 4], [3, 5], [0, 0])
    for lens in (np.array, torch.tensor, tuple):
        allocator = StripedAllocator(8, page_size=2, shard_size=2)
        got = allocator.alloc_extend(lens([0, 4]), lens([3, 5]), [0, np.int32(0)])
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, expected)
        got[:] = 0  # is the caller's
        allocator.free(torch.from_numpy(expected))
        assert allocator.class_free_page_counts() == [4, 4]


def test_an_allocator_says_what_it_is():
    allocator = StripedAllocator(9, page_size=4, shard_size=3, need_sort=True)
    text = "StripedAllocator(9, page_size=4, shard_size=3, need_sort=True)"
    assert repr(allocator) == text
    sizes = (allocator.size, allocator.page_size, allocator.shard_size, allocator.need_sort)
    assert sizes == (9, 4, 3, True)
    assert allocator.class_free_page_counts() == [2, 2, 2]


def test_memory_is_that_of_the_pages_in_use():
    """Not of the pool, which may be as large as slots can be numbered."""
    allocator = StripedAllocator(2**60, page_size=1, shard_size=2)
    assert allocator.available_size() == 2**61
    allocator.free(allocator.alloc_cyclic(0, 10))
    assert allocator.available_size() == 2**61


def test_an_allocator_belongs_to_its_process():
    allocator = StripedAllocator(8, page_size=2, shard_size=2)
    for call in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="StripedAllocator cannot be pickled or copied"):
            call(allocator)


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


def free(slots: list[int]) -> None:
    allocator = new()
    allocator.alloc_cyclic(0, 3)  # pages 2 and 3
    try:
        allocator.free(slots)
    finally:
        assert allocator.class_free_page_counts() == [3, 3]


EXTEND = "StripedAllocator.alloc_extend: "
FREE = "StripedAllocator.free: slots must be "
BEHIND = FREE + "in [4, 20), behind the reserved pages, got "
REFUSALS = [
    (lambda: new(-1), "StripedAllocator: size must be >= 0, got -1"),
    (lambda: new(2**62 - 3), f"StripedAllocator: size must be at most {2**62 - 4} for slots that"),
    (lambda: new(page_size=0), "StripedAllocator: page_size must be in [1, 2147483647], got 0"),
    (lambda: new(shard_size=0), "StripedAllocator: shard_size must be in [1, 32768], got 0"),
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
    (lambda: free([4, 3]), BEHIND + "3 at index 1"),
    (lambda: free([20]), BEHIND + "20 at index 0"),
    (lambda: free([-1]), BEHIND + "-1 at index 0"),
    (lambda: free([4, 6, 9]), FREE + "of allocated pages, got 9 at index 2, whose page 4 is free"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_breaks_a_rule_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


TYPES = [
    (lambda: new(8.0), "StripedAllocator: size must be an integer, got float"),
    (lambda: new(need_sort=1), "StripedAllocator: need_sort must be a bool, got int"),
    (lambda: extend([0], [1], (None,)), EXTEND + "rotation_bases must be a list of int or None, g"),
    (lambda: extend([0], [1], [0.0]), EXTEND + "rotation_bases must hold integers, got float at i"),
    (lambda: extend(np.zeros(1), [1], [None]), EXTEND + "prefix_lens must be int32 or int64, got"),
    (lambda: new().alloc_cyclic(None, 1), "StripedAllocator.alloc_cyclic: start_class must be an"),
    (lambda: new().free(np.ones(1, bool)), FREE + "int32 or int64, got bool"),
]


@pytest.mark.parametrize(("call", "message"), TYPES)
def test_other_types_are_refused(call, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        call()


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
