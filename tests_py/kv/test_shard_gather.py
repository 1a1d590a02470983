# SPDX-License-Identifier: Apache-2.0
"""Plans of gathers against a restatement, and against copies of whole pools and their scratch."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.kv import PageInterleave, ShardGatherPlan, StripedAllocator, plan_shard_gather
from support.examples import examples

SIZE = 64  # pages of each rank


def plan_of(table: Any, prefix_lens: Any, seq_lens: Any, **changes: Any) -> ShardGatherPlan:
    """Plan for pages of 4 tokens over two ranks, where nothing else is said."""
    sizes: dict[str, Any] = {
        "placement": PageInterleave(shard_size=2, page_size=4), "size": 16,
        "max_prefix_tokens": 32, "chunk_tokens": 16, "req_pool_indices": None,
    }  # fmt: skip
    sizes |= changes
    rows = sizes.pop("req_pool_indices")
    return plan_shard_gather(table, rows, prefix_lens, seq_lens, **sizes)


class Batch:
    """Requests of an engine, some of which share prefixes; `table` has their slots."""

    def __init__(self, draw: Any, shard_size: int, page_size: int, need_sort: bool) -> None:
        self.placement = PageInterleave(shard_size=shard_size, page_size=page_size)
        self.size = SIZE * page_size
        allocator = StripedAllocator(
            self.size, page_size=page_size, shard_size=shard_size, need_sort=need_sort
        )
        waste = [allocator.alloc_cyclic(draw(st.integers(0, 3)), page_size) for _ in range(9)]
        trees = [self._extend(allocator, [], draw(st.integers(0, 6)) * page_size, [None])]
        trees += [trees[0], self._extend(allocator, [], 3 * page_size, [None])]
        for slots in draw(st.lists(st.sampled_from(waste), unique_by=id)):
            allocator.free(slots)
        self.rows, self.prefix_lens, self.seq_lens = [], [], []
        for _ in range(draw(st.integers(0, 4))):
            slots, base = draw(st.sampled_from(trees))
            kept = draw(st.integers(0, len(slots) // page_size)) * page_size
            extend = draw(st.integers(0, 3 * page_size + 1))
            prefix, bases = slots[:kept], [base if kept else None]
            row, _ = self._extend(allocator, prefix, extend, bases) if extend else (prefix, 0)
            self.rows.append(row)
            self.prefix_lens.append(kept)
            self.seq_lens.append(kept + extend)

    @staticmethod
    def _extend(allocator: Any, slots: list[int], tokens: int, bases: Any) -> tuple[list[int], Any]:
        if tokens == 0:
            return slots, bases[0]
        got = allocator.alloc_extend([len(slots)], [len(slots) + tokens], bases)
        assert got is not None
        return slots + got.tolist(), bases[0]

    def table(self, height: int, at: list[int]) -> np.ndarray:
        table = np.full((height, max([1, *self.seq_lens])), -7)
        for i, row in zip(at, self.rows, strict=True):
            table[i, : len(row)] = row
        return table


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    return Batch(draw, draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.booleans()))


def restated(batch: Batch, prefix_pages: int, chunk_pages: int) -> dict[str, Any]:
    """The lookup by the sentences that describe it: dictionaries, one page at a time."""
    n, ps = batch.placement.shard_size, batch.placement.page_size
    prefixes, chunk, block = set(), [], 0
    for row, prefix, seq in zip(batch.rows, batch.prefix_lens, batch.seq_lens, strict=True):
        pages = [row[token] // ps for token in range(0, seq, ps)]
        prefixes |= set(pages[: prefix // ps])
        chunk += pages[prefix // ps :]
        block += -(-(prefix // ps) // n)
    trash = prefix_pages + chunk_pages
    where = dict.fromkeys(range(n * (SIZE + 1)), trash)
    send = []
    for rank in range(n):
        mine = sorted(page for page in prefixes if page % n == rank)
        where |= {page: rank * block + k for k, page in enumerate(mine)}
        send.append([page // n for page in mine] + [0] * (block - len(mine)))
    where |= {page: prefix_pages + k for k, page in enumerate(chunk)}
    return {
        "block_pages": block,
        "send_pages": send,
        "page_pos": list(where.values()),
        "prefix_pages": sorted(prefixes, key=lambda page: (page % n, page)),
        "chunk_pages": chunk,
        "chunk_page": prefix_pages,
        "trash_page": trash,
    }


def expected_writes(placement: PageInterleave, slots: range, rank: int) -> list[list[int]]:
    """Positions in [0, *slots] and rows of what a rank writes."""
    positions, rows = placement.filter_local([0, *slots], rank)
    return [positions.tolist(), rows.tolist()]


def plan_batch(batch: Batch, spare: int, data: st.DataObject) -> tuple[ShardGatherPlan, Any]:
    """Plan with that many pages more than are needed, from a table of any rows."""
    n, ps = batch.placement.shard_size, batch.placement.page_size
    block = sum(-(-(prefix // ps) // n) for prefix in batch.prefix_lens)
    chunk = sum(
        -(-(seq - prefix) // ps)
        for prefix, seq in zip(batch.prefix_lens, batch.seq_lens, strict=True)
    )
    at = data.draw(st.permutations(range(6)))[: len(batch.rows)]
    plan = plan_shard_gather(
        batch.table(6, at), at, batch.prefix_lens, batch.seq_lens, placement=batch.placement,
        size=batch.size, max_prefix_tokens=(block + spare) * n * ps,
        chunk_tokens=(chunk + spare) * ps,
    )  # fmt: skip
    return plan, restated(batch, (block + spare) * n, chunk + spare)


@settings(max_examples=examples(150), deadline=None)
@given(batch=batches(), spare=st.integers(0, 2), data=st.data())
def test_plans_are_what_the_rules_say(batch, spare, data):
    plan, expected = plan_batch(batch, spare, data)
    got = plan.to_dict()
    assert {name: got[name] for name in expected} == expected
    for name in ("page_pos", "send_pages", "prefix_pages", "chunk_pages"):
        array = getattr(plan, name)
        assert array.tolist() == expected[name]
        assert array.dtype == np.int32
        assert not array.flags.writeable
    assert plan.send_pages.shape == (batch.placement.shard_size, plan.block_pages)
    assert pickle.loads(pickle.dumps(plan)) == plan
    page_size, placement = batch.placement.page_size, batch.placement
    slots = range(-1, placement.shard_size * (SIZE + 1) * page_size)
    where = [
        expected["page_pos"][slot // page_size] * page_size + slot % page_size for slot in slots
    ]
    assert plan.translate([*slots]).tolist() == [-1, *where[1:]]
    for rank in range(placement.shard_size):  # the reserved pages are those of rank 0
        written = plan.write_plan([0, *slots], rank)
        assert [part.tolist() for part in written] == expected_writes(placement, slots, rank)


SLOTS = list(range(8, 22))  # pages 2 to 5


def test_a_small_plan_in_every_container():
    plan = plan_of([SLOTS], [8], [14])
    for table in (np.array([SLOTS]), np.array([SLOTS], np.int32), torch.tensor([SLOTS])):
        assert plan_of(table, np.array([8]), torch.tensor([14])) == plan
        assert plan_of(table, [8], [14], req_pool_indices=[0]) == plan
    wide = np.full((1, 28), -5)
    wide[:, ::2] = SLOTS
    assert plan_of(wide[:, ::2], [8], [14]) == plan
    assert plan.translate(np.array([8, -1, 13], np.int32)).tolist() == [0, -1, 5]
    assert plan.translate(torch.tensor([0, 7, 3])).tolist() == [48, 51, 51]  # reserved pages
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
