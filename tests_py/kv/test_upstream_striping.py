# SPDX-License-Identifier: Apache-2.0
"""Placement, allocator and gather plans of striped pools against those of sglang 0.5.23 itself.

Runs where a wheel of sglang is at hand (see `sglang_upstream`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cpattn.kv import PageInterleave, ShardGatherPlan, StripedAllocator, plan_shard_gather
from support.sglang import sglang_upstream, striped_pools


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    return sglang_upstream.load_or_skip()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(523)


def test_placement(sglang, rng):
    for _ in range(300):
        sizes = striped_pools.random_sizes(rng)
        theirs = sglang.striping.PageInterleavePlacement(striped_pools.spec_of(**sizes))
        ours, slots = PageInterleave(**sizes), rng.integers(0, 500, rng.integers(0, 60))
        given = torch.from_numpy(slots)
        np.testing.assert_array_equal(ours.owner_of(slots), theirs.owner_of(given))
        np.testing.assert_array_equal(ours.local_index(slots), theirs.local_index(given))
        for rank in range(sizes["shard_size"]):
            rows = ours.filter_local(slots, rank)[1]
            np.testing.assert_array_equal(rows, theirs.filter_local(given, rank))


@pytest.mark.parametrize("need_sort", [False, True])
def test_allocator(sglang, rng, need_sort):
    num_refused = 0
    for _ in range(60):
        sizes = striped_pools.random_sizes(rng)
        page_size, size = sizes["page_size"], int(rng.integers(0, 120))
        ours = StripedAllocator(size, **sizes, need_sort=need_sort)
        theirs = striped_pools.make_allocator(sglang, size, sizes, need_sort)
        used = np.array([], np.int64)
        for _ in range(40):
            prefixes, lens, bases = striped_pools.random_extend(rng, page_size)
            written = list(bases)
            given = striped_pools.extend_arguments(prefixes, lens)
            expected = theirs.alloc_extend(*given, rotation_bases=written)
            got = ours.alloc_extend(prefixes, lens, bases)
            assert bases == written
            if expected is None:
                assert got is None
                num_refused += 1
            else:
                np.testing.assert_array_equal(got, expected)
                used = np.concatenate([used, got])
            freed = rng.choice(used, int(rng.integers(0, len(used) + 1)), replace=False)
            ours.free(freed)
            theirs.free(torch.from_numpy(freed))
            used = used[~np.isin(used // page_size, freed // page_size)]
            for count in ("class_free_page_counts", "available_size", "aggregate_free_size",
                          "least_full_class"):  # fmt: skip
                assert getattr(ours, count)() == getattr(theirs, count)()
    assert num_refused > 50


def test_alloc_cyclic(sglang, rng):
    for _ in range(100):
        sizes = striped_pools.random_sizes(rng)
        ours = StripedAllocator(60, **sizes)
        theirs = striped_pools.make_allocator(sglang, 60, sizes, need_sort=False)
        for _ in range(5):
            start, num_slots = int(rng.integers(-9, 9)), int(rng.integers(1, 80))
            expected, got = (x.alloc_cyclic(start, num_slots) for x in (theirs, ours))
            assert (got is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(got, expected)


def outcome(plan: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return plan(*arguments, **options)
    except (AssertionError, ValueError):
        return "refused"


def test_gather_plans(sglang, rng):
    num_refused = 0
    for _ in range(300):
        sizes = striped_pools.random_sizes(rng)
        shard_size, page_size = sizes["shard_size"], sizes["page_size"]
        size = 60 * page_size
        table, prefixes, lens = striped_pools.random_table(rng, StripedAllocator(size, **sizes))
        scratch = striped_pools.random_scratch(rng, sizes)
        rows = rng.permutation(6)[: len(lens)]
        moved = np.zeros_like(table)
        moved[rows] = table[: len(lens)]
        pools = [
            striped_pools.make_pool(sglang, rank, sizes, scratch, size)
            for rank in range(shard_size)
        ]
        given = torch.from_numpy(moved), torch.from_numpy(rows), prefixes, lens
        refused = [outcome(pool.begin_shard_extend, *given) for pool in pools]
        options = {"placement": PageInterleave(**sizes), "size": size} | scratch
        plan = outcome(plan_shard_gather, moved, rows, prefixes, lens, **options)
        assert {plan == "refused"} == {said == "refused" for said in refused}
        if plan == "refused":
            num_refused += 1
            continue
        for rank, pool in enumerate(pools):
            assert_same_plan(plan, rank, pool, rng)
    assert 50 < num_refused < 250


def assert_same_plan(plan: ShardGatherPlan, rank: int, pool: Any, rng: Any) -> None:
    num_pages = len(plan.page_pos)
    np.testing.assert_array_equal(plan.page_pos, pool._page_pos[:num_pages])
    assert plan.block_pages == pool._block_pages
    if plan.block_pages:
        np.testing.assert_array_equal(plan.send_pages[rank], pool._send_pages)
    else:
        assert pool._send_pages is None
    slots = rng.integers(0, num_pages * plan.page_size, 50)
    given = torch.from_numpy(slots)
    np.testing.assert_array_equal(plan.translate(slots), pool.translate_loc_to_scratch(given))
    for ours, theirs in zip(plan.write_plan(slots, rank), pool._get_write_plan(given), strict=True):
        np.testing.assert_array_equal(ours, theirs)
