# SPDX-License-Identifier: Apache-2.0
"""Placements, gathers and the allocator of sharded pools are right, and refuse what is not.

`tests_cpp/kv` has places of all sizes, plans of any batches, and calls in any order.
"""

import copy
import pickle
import re
from dataclasses import FrozenInstanceError
from itertools import product
from typing import Any

import numpy as np
import pytest

from cpattn.kv import (
    PageInterleave,
    ShardGatherPlan,
    StripedAllocator,
    TokenInterleave,
    plan_shard_gather,
)


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
    """Indices may be in any order, large, or padding, in runs of four over two ranks."""
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
NO_PLACES = [
    (lambda: by_pages(0, 4), "PageInterleave: shard_size must be in [1, 32768], got 0"),
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


def plan_of(table: Any, prefix_lens: Any, seq_lens: Any, **changes: Any) -> ShardGatherPlan:
    """Plan for pages of 4 tokens over two ranks, unless `changes` differ."""
    sizes: dict[str, Any] = {
        "placement": PageInterleave(shard_size=2, page_size=4), "size": 16,
        "max_prefix_tokens": 32, "chunk_tokens": 16, "req_pool_indices": None,
    }  # fmt: skip
    sizes |= changes
    rows = sizes.pop("req_pool_indices")
    return plan_shard_gather(table, rows, prefix_lens, seq_lens, **sizes)


SLOTS = list(range(8, 22))  # pages 2 to 5


def test_a_small_plan():
    plan = plan_of([SLOTS], [8], [14])
    assert plan_of([[-7] * 14, SLOTS], [8], [14], req_pool_indices=[1]) == plan
    assert plan.send_pages.tolist() == [[1], [1]]
    assert plan.translate([8, -1, 13]).tolist() == [0, -1, 5]
    assert plan.translate([0, 7, 3]).tolist() == [48, 51, 51]  # reserved pages
    assert [part.tolist() for part in plan.write_plan([0, 16, 20, 0], 0)] == [[0, 1, 3], [0, 8, 0]]
    assert [part.tolist() for part in plan.write_plan([0, 16, 20, -1], 1)] == [[2], [8]]


def test_a_batch_without_prefixes_gathers_nothing():
    plan = plan_of([SLOTS], [0], [14], max_prefix_tokens=0)
    assert plan.block_pages == 0
    assert plan.send_pages.shape == (2, 0)
    assert plan.translate(SLOTS).tolist() == list(range(14))
    assert plan_of([SLOTS], [12], [12], chunk_tokens=0).chunk_pages.tolist() == []
    empty = plan_of(np.zeros((0, 3), int), [], [])
    assert set(empty.page_pos.tolist()) == {empty.trash_page} == {12}
    assert plan_of(np.zeros((0, 3), int), [], [], size=0).page_pos.tolist() == [12, 12]


def test_plans_are_values():
    plan, other = plan_of([SLOTS], [8], [14]), plan_of([SLOTS], [8], [12])
    assert len({plan, plan_of([SLOTS], [8], [13]), other}) == 2
    assert plan != other
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert not plan.page_pos.flags.writeable
    assert plan != plan_of([SLOTS], [8], [14], size=20)
    expected = "ShardGatherPlan(shard_size=2, page_size=4, block_pages=1, 2 prefix pages, "
    assert repr(plan) == expected + "2 chunk pages)"


def refused(message, slots=SLOTS, prefix=8, seq=14, **changes):
    """Return a row of the table: a refused plan of one request, or of tuples of them."""
    rows, prefixes, lens = (x if isinstance(x, tuple) else (x,) for x in (slots, prefix, seq))
    return lambda: plan_of(
        [*rows], [*prefixes], [*lens], **changes
    ), f"plan_shard_gather: {message}"


NOT_A_PAGE = "req_to_token must have slots of pages 2 to 9 of 4 tokens, got "
FIRST = "as the first of a page at token "
TWICE = "req_to_token must have each new page once and not as part of a prefix, got page "
WHOLE = "max_prefix_tokens must be a multiple of shard_size * page_size, 8, and >= 0, got "
IN_TURN = "req_to_token must have the pages of a prefix on the ranks in turn, got page "
ONE_RANK = PageInterleave(shard_size=1, page_size=4)
NO_PLANS = [
    refused("placement must have a shard_size >= 2, got 1: one rank has all", placement=ONE_RANK),
    refused("size must be in [0, 536870908], got 536870909", size=536870909),
    refused("size must be in [0, 536870908], got -1", size=-1),
    refused(WHOLE + "12", max_prefix_tokens=12),
    refused(WHOLE + "-8", max_prefix_tokens=-8),
    refused("chunk_tokens must be a multiple of page_size, 4, and >= 0, got 6", chunk_tokens=6),
    refused("max_prefix_tokens and chunk_tokens must be at most 268435456 pages together, got 26843"
            "5456 and 4", max_prefix_tokens=2**30),
    refused("seq_lens must have as many elements as prefix_lens, 1, got 2", seq=(14, 14)),
    refused("req_to_token must have a row for each of the 2 requests, got 1", prefix=(8, 8),
            seq=(14, 14)),
    refused("req_pool_indices must have a row for each of the 1 requests, got 2",
            req_pool_indices=[0, 0]),
    refused("req_pool_indices must be in [0, 1), got 1 at index 0", req_pool_indices=[1]),
    refused("prefix_lens must be multiples of page_size 4 and >= 0, got 6 at index 0", prefix=6),
    refused("prefix_lens must be multiples of page_size 4 and >= 0, got -4 at index 0", prefix=-4),
    refused("seq_lens must be >= prefix_lens, got 7 below 8 at index 0", seq=7),
    refused("req_to_token must have a column for each of the 15 tokens of request 0, got", seq=15),
    refused("max_prefix_tokens must hold 2 blocks of 2 pages of 4 tokens, got 8", prefix=12,
            max_prefix_tokens=8),
    refused("chunk_tokens must hold 2 pages of 4 tokens, got 4", chunk_tokens=4),
    refused(f"{NOT_A_PAGE}9 {FIRST}0 of request 0", [9, 10], 0, 2),
    refused(f"{NOT_A_PAGE}4 {FIRST}0 of request 0", [4, 5], 0, 2),
    refused(f"{NOT_A_PAGE}-1 {FIRST}0 of request 0", [-1, -1], 0, 2),
    refused(f"{NOT_A_PAGE}40 {FIRST}4 of request 1", (SLOTS, [*range(16, 20), 40]), (0, 0), (4, 5)),
    refused(IN_TURN + "4 of rank 0 instead of 1 as page 1 of request 0",
            [*range(8, 12), *range(16, 20)], 8, 8),
    refused(IN_TURN + "6 of rank 0 instead of 1 as page 2 of request 1",
            (SLOTS[:8], [*range(12, 20), *range(24, 28)]), (0, 12), (8, 12)),
    refused(TWICE + "2 again as page 0 of request 1", (SLOTS, SLOTS), (0, 0), (4, 4)),
    refused(TWICE + "3 again as page 1 of request 1", (SLOTS, SLOTS), (8, 4), (8, 8)),
]  # fmt: skip


PLAN, OUTSIDE = plan_of([SLOTS], [8], [14]), "slots must be in [0, 40), or -1 for padding, got "
USES = [
    (lambda: PLAN.translate([0, 40]), f"ShardGatherPlan.translate: {OUTSIDE}40 at index 1"),
    (lambda: PLAN.translate([-2]), f"ShardGatherPlan.translate: {OUTSIDE}-2 at index 0"),
    (lambda: PLAN.write_plan([40], 0), f"ShardGatherPlan.write_plan: {OUTSIDE}40 at index 0"),
    (lambda: PLAN.write_plan([9, -2], 0), "ShardGatherPlan.write_plan: slots must be >= 0, or"),
    (lambda: PLAN.write_plan([9], 2), "ShardGatherPlan.write_plan: rank must be in [0, 2), got 2"),
]


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
    assert repr(allocator) == "StripedAllocator(9, page_size=4, shard_size=3, need_sort=True)"
    sizes = (allocator.size, allocator.page_size, allocator.shard_size, allocator.need_sort)
    assert sizes == (9, 4, 3, True)
    assert allocator.class_free_page_counts() == [2, 2, 2]


def test_memory_is_that_of_the_pages_in_use():
    """The size of the pool may be the largest number of a slot."""
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
NO_PAGES = [
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


@pytest.mark.parametrize(("call", "message"), [*NO_PLACES, *NO_PLANS, *USES, *NO_PAGES])
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
