# SPDX-License-Identifier: Apache-2.0
"""Plans of striped pools by the plug-in against sglang's own functions, on sglang's own objects."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cpattn.integrations import sglang as plugin
from cpattn.integrations.sglang import shards
from cpattn.kv import StripedAllocator
from support.sglang import striped_pools as pools
from support.sglang.installed import MARKS

pytestmark = MARKS


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(523)


@pytest.fixture
def switched_on(switch) -> None:
    plugin.install("shards")


def by_sglang(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call sglang's own function while the plug-in is active."""
    plugin.uninstall()
    try:
        return call(*arguments, **options)
    finally:
        plugin.install("shards")


def listed(pages: list[torch.Tensor]) -> list[list[int]]:
    return [of_class.tolist() for of_class in pages]


def assert_same_lists(ours: Any, theirs: Any) -> None:
    for name in ("class_free_pages", "class_release_pages"):
        assert listed(getattr(ours, name)) == listed(getattr(theirs, name))
        assert {pages.dtype for pages in getattr(ours, name)} == {torch.int64}


@pytest.mark.parametrize("need_sort", [False, True])
def test_allocator(sglang, rng, switched_on, need_sort):
    num_refused = 0
    for _ in range(40):
        sizes = pools.random_sizes(rng)
        page_size, size = sizes["page_size"], int(rng.integers(0, 120))
        ours, theirs = (pools.make_allocator(sglang, size, sizes, need_sort) for _ in range(2))
        used = np.array([], np.int64)
        for _ in range(30):
            prefixes, lens, bases = pools.random_extend(rng, page_size)
            given, written = pools.extend_arguments(prefixes, lens), list(bases)
            expected = by_sglang(theirs.alloc_extend, *given, rotation_bases=written)
            got = ours.alloc_extend(*given, rotation_bases=bases)
            assert bases == written
            if expected is None:
                assert got is None
                num_refused += 1
            else:
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected)
                used = np.concatenate([used, got])
            assert_same_lists(ours, theirs)
            freed = rng.choice(used, int(rng.integers(0, len(used) + 1)), replace=False)
            ours.free(torch.from_numpy(freed))
            by_sglang(theirs.free, torch.from_numpy(freed))
            used = used[~np.isin(used // page_size, freed // page_size)]
            assert_same_lists(ours, theirs)
            if rng.random() < 0.2:  # either one can continue with the state of the other
                ours, theirs = theirs, ours
    assert num_refused > 50


SIZES = {"shard_size": 2, "page_size": 4}


def test_cyclic_runs_deferred_frees_and_debug_mode(sglang, switched_on):
    ours, theirs = (pools.make_allocator(sglang, 32, SIZES, False) for _ in range(2))
    slots = ours.alloc_cyclic(-1, 10)
    assert torch.equal(slots, by_sglang(theirs.alloc_cyclic, -1, 10))
    ours.free_group_begin()
    ours.free(slots)
    assert ours.available_size() < 64
    ours.free_group_end()
    assert ours.available_size() == 64
    by_sglang(theirs.free, slots)
    assert_same_lists(ours, theirs)
    ours.debug_mode = True  # the debug mode of sglang
    slots = ours.alloc_extend(*pools.extend_arguments([0], [9]), rotation_bases=[None])
    ours.free(slots)
    with pytest.raises(AssertionError, match="double free"):
        ours.free(slots)


def test_what_sglang_asserts_or_corrupts_is_refused(sglang, switched_on):
    allocator = pools.make_allocator(sglang, 32, SIZES, False)
    before = listed(allocator.class_free_pages)
    bases = [None]
    with pytest.raises(ValueError, match=r"prefix_lens must be multiples of page_size 4, got 3"):
        allocator.alloc_extend(*pools.extend_arguments([3], [5]), rotation_bases=bases)
    assert bases == [None]
    *given, num_tokens = pools.extend_arguments([4], [9])
    with pytest.raises(ValueError, match=r"extend_num_tokens must be 5, .* got 6"):
        allocator.alloc_extend(*given, num_tokens + 1, rotation_bases=[None])
    message = r"slots must be in \[8, 72\), behind the reserved pages, got 72 at index 1"
    with pytest.raises(ValueError, match=message):
        allocator.free(torch.tensor([8, 72]))
    assert listed(allocator.class_free_pages) == before


PLANNED = "_page_pos _send_pages _send_rows _block_pages _epoch _shard_extend_active"


def assert_same_plan(ours: Any, theirs: Any) -> None:
    for name in PLANNED.split():
        got, expected = getattr(ours, name), getattr(theirs, name)
        assert type(got) is type(expected)
        if isinstance(expected, torch.Tensor):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected), name
        else:
            assert got == expected, name


def outcome(begin: Callable[..., Any], *arguments: Any) -> str:
    try:
        begin(*arguments)
    except (AssertionError, ValueError):
        return "refused"
    return "planned"


def test_gather_plans(sglang, rng, switched_on):
    outcomes = {"planned": 0, "refused": 0}
    for _ in range(200):
        sizes = pools.random_sizes(rng)
        size = 60 * sizes["page_size"]
        table, prefixes, lens = pools.random_table(rng, StripedAllocator(size, **sizes))
        scratch = pools.random_scratch(rng, sizes)
        rows = torch.from_numpy(rng.permutation(6)[: len(lens)])
        moved = torch.full(table.shape, -7, dtype=torch.int32)
        moved[rows] = torch.from_numpy(table[: len(lens)]).int()
        given = moved, rows, prefixes, torch.tensor(lens) if rng.random() < 0.5 else lens
        for rank in range(sizes["shard_size"]):
            ours, theirs = (pools.make_pool(sglang, rank, sizes, scratch, size) for _ in range(2))
            started: list[int] = []
            ours._debug_plan_checks = False
            ours._translate_cache = {"of the batch before": 1}
            ours._prefetch_layer = started.append
            said = outcome(ours.begin_shard_extend, *given)
            assert said == by_sglang(outcome, theirs.begin_shard_extend, *given)
            outcomes[said] += 1
            if said == "planned":
                assert_same_plan(ours, theirs)
                assert not ours._translate_cache
                assert started == ([0] if theirs._block_pages else [])
            else:
                assert ours._epoch == 0
    assert min(outcomes.values()) > 100, outcomes


def pool_and_table(sglang: SimpleNamespace) -> tuple[Any, torch.Tensor]:
    scratch = {"max_prefix_tokens": 32, "chunk_tokens": 16}
    pool = pools.make_pool(sglang, 0, SIZES, scratch, size=40)
    pool._debug_plan_checks = False
    return pool, torch.zeros((2, 24), dtype=torch.int32)


def test_a_warm_up_batch_is_left_to_sglang(sglang, switched_on):
    pool, table = pool_and_table(sglang)
    pool.begin_shard_extend(table, torch.tensor([1, 0]), [0, 0], [6, 4])
    assert pool._epoch == 1
    assert pool._page_pos[0] == 8 + 2  # the last of three chunk pages
    assert pool._send_pages is None


def test_prefixes_that_are_not_on_the_ranks_in_turn_are_refused(sglang, switched_on):
    """The ranks of sglang may then mean different rows, which only its debug mode refuses."""
    pool, table = pool_and_table(sglang)
    table[0, :12] = torch.tensor([*range(8, 12), *range(16, 20), *range(12, 16)])
    before = pool._page_pos.clone()
    with pytest.raises(ValueError, match="prefix"):
        pool.begin_shard_extend(table, torch.tensor([0]), [8], [12])
    assert torch.equal(pool._page_pos, before)
    pool._debug_plan_checks = True
    with pytest.raises(AssertionError, match="not cyclic"):
        pool.begin_shard_extend(table, torch.tensor([0]), [8], [12])
    another, _ = pool_and_table(sglang)
    with pytest.raises(ValueError, match=r"prefix_lens_cpu must be multiples of page_size 4"):
        shards.begin_shard_extend(None, another, table, torch.tensor([0]), [3], [5])
