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


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    from support.sglang import sglang_upstream

    modules = sglang_upstream.load()
    if modules is None:
        pytest.skip("sglang is not installed and CPATTN_SGLANG names no wheel of it")
    return modules


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(523)


def spec_of(shard_size: int, page_size: int, **more: int) -> SimpleNamespace:
    return SimpleNamespace(shard_size=shard_size, page_size=page_size, **more)


def random_sizes(rng: np.random.Generator) -> dict[str, int]:
    return {"shard_size": int(rng.integers(2, 9)), "page_size": int(rng.choice([1, 2, 4, 7]))}


def test_placement(sglang, rng):
    for _ in range(300):
        sizes = random_sizes(rng)
        theirs = sglang.striping.PageInterleavePlacement(spec_of(**sizes))
        ours, slots = PageInterleave(**sizes), rng.integers(0, 500, rng.integers(0, 60))
        given = torch.from_numpy(slots)
        np.testing.assert_array_equal(ours.owner_of(slots), theirs.owner_of(given))
        np.testing.assert_array_equal(ours.local_index(slots), theirs.local_index(given))
        for rank in range(sizes["shard_size"]):
            np.testing.assert_array_equal(
                ours.filter_local(slots, rank)[1], theirs.filter_local(given, rank)
            )


def their_allocator(sglang: SimpleNamespace, size: int, sizes: Any, need_sort: bool) -> Any:
    return sglang.striped_allocator.PageInterleavePoolAllocator(
        size=size, physical_page_size=sizes["page_size"], shard_size=sizes["shard_size"],
        dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=need_sort,
    )  # fmt: skip


def their_extend(theirs: Any, prefix_lens: list[int], seq_lens: list[int], bases: Any) -> Any:
    prefixes, lens = torch.tensor(prefix_lens), torch.tensor(seq_lens)
    last_loc = torch.zeros_like(prefixes)  # read in its debug mode only
    num_tokens = sum(seq_lens) - sum(prefix_lens)
    return theirs.alloc_extend(
        prefixes, prefixes, lens, lens, last_loc, num_tokens, rotation_bases=bases
    )


@pytest.mark.parametrize("need_sort", [False, True])
def test_allocator(sglang, rng, need_sort):
    num_refused = 0
    for _ in range(60):
        sizes = random_sizes(rng)
        page_size, size = sizes["page_size"], int(rng.integers(0, 120))
        ours = StripedAllocator(size, **sizes, need_sort=need_sort)
        theirs = their_allocator(sglang, size, sizes, need_sort)
        used = np.array([], np.int64)
        for _ in range(40):
            bs = int(rng.integers(1, 4))
            prefixes = (rng.integers(0, 5, bs) * page_size).tolist()
            lens = [prefix + int(rng.integers(1, 4 * page_size + 1)) for prefix in prefixes]
            bases = [None if rng.random() < 0.6 else int(rng.integers(-9, 9)) for _ in range(bs)]
            written = list(bases)
            expected = their_extend(theirs, prefixes, lens, written)
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
            assert ours.class_free_page_counts() == theirs.class_free_page_counts()
            assert ours.available_size() == theirs.available_size()
            assert ours.aggregate_free_size() == theirs.aggregate_free_size()
            assert ours.least_full_class() == theirs.least_full_class()
    assert num_refused > 50


def test_alloc_cyclic(sglang, rng):
    for _ in range(100):
        sizes = random_sizes(rng)
        ours = StripedAllocator(60, **sizes)
        theirs = their_allocator(sglang, 60, sizes, need_sort=False)
        for _ in range(5):
            start, num_slots = int(rng.integers(-9, 9)), int(rng.integers(1, 80))
            expected, got = (x.alloc_cyclic(start, num_slots) for x in (theirs, ours))
            assert (got is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(got, expected)


def their_pool(sglang: SimpleNamespace, rank: int, sizes: Any, scratch: Any, size: int) -> Any:
    """What its pools share, without buffers and without the gather itself."""
    pool = object.__new__(sglang.striped_pools.PageInterleaveKVPoolMixin)
    page_size, shard_size = sizes["page_size"], sizes["shard_size"]
    spec = spec_of(shard_rank=rank, **sizes, **scratch)
    trash_base = scratch["max_prefix_tokens"] + scratch["chunk_tokens"]
    vars(pool).update(
        shard_spec=spec, shard_rank=rank, device="cpu", size=size, start_layer=0, _epoch=0,
        _chunk_base=scratch["max_prefix_tokens"], _trash_base=trash_base, _translate_cache={},
        _page_pos=torch.full((shard_size * (size // page_size + 2),), -1, dtype=torch.int32),
        _local_page_stride=size // page_size + 2, _debug_plan_checks=True, _write_plan_key=None,
        placement=sglang.striping.PageInterleavePlacement(spec), _prefetch_layer=lambda layer: None,
    )  # fmt: skip
    return pool


def random_table(
    rng: np.random.Generator, allocator: StripedAllocator
) -> tuple[np.ndarray, list[int], list[int]]:
    """Slots of requests that share prefixes and go on from them."""
    page_size = allocator.page_size
    trees = [allocator.alloc_cyclic(int(rng.integers(9)), 6 * page_size) for _ in range(3)]
    allocator.free(trees.pop(0))
    table = np.full((6, 12 * page_size), -7)
    prefixes, lens = [], []
    for i in range(int(rng.integers(1, 5))):
        tree = trees[rng.integers(2)]
        prefix = int(rng.integers(0, 7)) * page_size
        end = prefix + int(rng.integers(0, 3 * page_size + 1))
        base = int(tree[0]) // page_size % allocator.shard_size
        table[i, :prefix] = tree[:prefix]
        if end > prefix:
            table[i, prefix:end] = allocator.alloc_extend([prefix], [end], [base])
        prefixes.append(prefix)
        lens.append(end)
    return table, prefixes, lens


def outcome(plan: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return plan(*arguments, **options)
    except (AssertionError, ValueError):
        return "refused"


def test_gather_plans(sglang, rng):
    num_refused = 0
    for _ in range(300):
        sizes = random_sizes(rng)
        shard_size, page_size = sizes["shard_size"], sizes["page_size"]
        size = 60 * page_size
        table, prefixes, lens = random_table(rng, StripedAllocator(size, **sizes))
        scratch = {
            "max_prefix_tokens": int(rng.integers(0, 16)) * shard_size * page_size,
            "chunk_tokens": int(rng.integers(0, 16)) * page_size,
        }
        rows = rng.permutation(6)[: len(lens)]
        moved = np.zeros_like(table)
        moved[rows] = table[: len(lens)]
        pools = [their_pool(sglang, rank, sizes, scratch, size) for rank in range(shard_size)]
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
