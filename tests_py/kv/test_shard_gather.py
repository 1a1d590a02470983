# SPDX-License-Identifier: Apache-2.0
"""Plans of gathers from Python: results, values, and what is refused.

`tests_cpp/kv/shard_gather_test.cc` has plans of any batches.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest

from cpattn.kv import PageInterleave, ShardGatherPlan, plan_shard_gather


def plan_of(table: Any, prefix_lens: Any, seq_lens: Any, **changes: Any) -> ShardGatherPlan:
    """Plan for pages of 4 tokens over two ranks, where nothing else is said."""
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
    """A row of the table: a plan of one request, or of lists of them, that is refused."""
    rows, prefixes, lens = (x if isinstance(x, tuple) else (x,) for x in (slots, prefix, seq))
    return lambda: plan_of([*rows], [*prefixes], [*lens], **changes), message


NOT_A_PAGE = "req_to_token must have slots of pages 2 to 9 of 4 tokens, got "
FIRST = "as the first of a page at token "
TWICE = "req_to_token must have each new page once and not as part of a prefix, got page "
WHOLE = "max_prefix_tokens must be a multiple of shard_size * page_size, 8, and >= 0, got "
IN_TURN = "req_to_token must have the pages of a prefix on the ranks in turn, got page "
ONE_RANK = PageInterleave(shard_size=1, page_size=4)
REFUSALS = [
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


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_breaks_a_rule_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^plan_shard_gather: {re.escape(message)}"):
        call()


PLAN, OUTSIDE = plan_of([SLOTS], [8], [14]), "slots must be in [0, 40), or -1 for padding, got "
USES = [
    (lambda: PLAN.translate([0, 40]), f"translate: {OUTSIDE}40 at index 1"),
    (lambda: PLAN.translate([-2]), f"translate: {OUTSIDE}-2 at index 0"),
    (lambda: PLAN.write_plan([40], 0), f"write_plan: {OUTSIDE}40 at index 0"),
    (lambda: PLAN.write_plan([9, -2], 0), "write_plan: slots must be >= 0, or -1 for padding, got"),
    (lambda: PLAN.write_plan([9], 2), "write_plan: rank must be in [0, 2), got 2"),
]


@pytest.mark.parametrize(("call", "message"), USES)
def test_slots_outside_the_pool_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^ShardGatherPlan.{re.escape(message)}"):
        call()
