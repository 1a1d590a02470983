# SPDX-License-Identifier: Apache-2.0
"""The prefix cache against a model that keeps everything in one list and searches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpattn.traffic.prefix_cache import Lease, PrefixCache
from support.examples import examples

BLOCK = 4


@dataclass
class Entry:
    """One cached block: the hashes up to it, its tokens, who holds it, when it became idle."""

    ids: tuple[int, ...]
    size: int
    users: int
    idle_since: tuple[int, int]  # (release, -depth): of one release the deepest is the oldest


class SlowCache:
    """LRU over blocks of one page each (page_size == BLOCK), by exhaustive search."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.entries: list[Entry] = []
        self.clock = 0

    def acquire(self, ids: tuple[int, ...], num_tokens: int) -> tuple[list[Entry], int] | None:
        wanted = [(ids[: i + 1], min(BLOCK, num_tokens - i * BLOCK)) for i in range(len(ids))]
        held = []
        for key in wanted:
            found = [e for e in self.entries if (e.ids, e.size) == key]
            if not found:
                break
            held += found
        missing = len(wanted) - len(held)
        idle = [e for e in self.entries if not e.users and not any(e is h for h in held)]
        if missing > self.num_pages - len(self.entries) + len(idle):
            return None
        idle.sort(key=lambda e: e.idle_since)
        while len(self.entries) + missing > self.num_pages:
            self.entries.remove(idle.pop(0))
        cached = sum(e.size for e in held)
        held += [Entry(*key, 0, (0, 0)) for key in wanted[len(held) :]]
        self.entries += [e for e in held if not any(e is other for other in self.entries)]
        for entry in held:
            entry.users += 1
        return held, cached

    def release(self, held: list[Entry]) -> None:
        self.clock += 1
        for entry in held:
            entry.users -= 1
            entry.idle_since = (self.clock, -len(entry.ids))


# Few hashes and short prompts: prefixes collide often, also behind different parents.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).flatmap(
    lambda ids: st.tuples(
        st.just(tuple(ids)), st.integers((len(ids) - 1) * BLOCK + 1, len(ids) * BLOCK)
    )
)
steps = st.lists(st.one_of(prompts, st.integers(0, 5)), max_size=60)


def check_pages(
    cache: PrefixCache, leases: list[Lease], text: dict[int, tuple[object, ...]]
) -> None:
    """No page is free and held, or shared by different prefixes; every page is accounted for."""
    held = {int(p) for lease in leases for p in lease.page_ids}
    pages: Any = cache._pages
    free = {*pages._free, *range(pages._used + 1, cache.num_pages + 1)}
    idle = [p for block in cache._idle.values() for p in block.page_ids]
    assert len(free) == cache.num_free_pages
    assert len(set(idle)) == len(idle) == cache.num_idle_pages
    assert not held & free
    assert not held & set(idle)
    assert not free & set(idle)
    assert len(held) + len(free) + len(idle) == cache.num_pages
    assert held <= text.keys()


@settings(max_examples=examples(300), deadline=None)
@given(steps=steps, num_pages=st.integers(5, 14))
def test_behaves_as_the_slow_model(steps: list[object], num_pages: int) -> None:
    cache = PrefixCache(num_pages, page_size=BLOCK, block_tokens=BLOCK)
    slow = SlowCache(num_pages)
    leases: list[tuple[Lease, list[Entry]]] = []
    content: dict[int, tuple[object, ...]] = {}  # page -> what was last written to it
    for step in steps:
        if isinstance(step, int):
            if leases:
                lease, entries = leases.pop(step % len(leases))
                cache.release(lease)
                slow.release(entries)
        else:
            ids, num_tokens = step
            lease, expected = cache.acquire(ids, num_tokens), slow.acquire(ids, num_tokens)
            assert (lease is None) == (expected is None)
            if lease is not None and expected is not None:
                entries, cached = expected
                assert lease.cached_tokens == cached
                for i, page in enumerate(lease.page_ids.tolist()):
                    key = (ids[: i + 1], min(BLOCK, num_tokens - i * BLOCK))
                    if i * BLOCK < cached:
                        assert content[page] == key  # still what this prefix wrote
                    content[page] = key
                leases.append((lease, entries))
        check_pages(cache, [lease for lease, _ in leases], content)
    for lease, entries in leases:
        for i, (page, entry) in enumerate(zip(lease.page_ids.tolist(), entries, strict=True)):
            assert content[page] == (entry.ids, entry.size), i


@dataclass
class StripedEntry(Entry):
    """A block of `BLOCK // 2` pages, the first of them on rank `rank`."""

    rank: int = 0


class SlowStripedCache:
    """The same of blocks of two pages over `size` ranks, of which each has `each` pages."""

    def __init__(self, size: int, each: int) -> None:
        self.size, self.each = size, each
        self.entries: list[StripedEntry] = []
        self.clock = 0

    def free(self, entries: list[StripedEntry]) -> list[int]:
        free = [self.each] * self.size
        for entry in entries:
            for page in range(-(-entry.size // 2)):
                free[(entry.rank + page) % self.size] -= 1
        return free

    def acquire(
        self, ids: tuple[int, ...], num_tokens: int
    ) -> tuple[list[StripedEntry], int] | None:
        wanted = [(ids[: i + 1], min(BLOCK, num_tokens - i * BLOCK)) for i in range(len(ids))]
        held: list[StripedEntry] = []
        for key in wanted:
            found = [e for e in self.entries if (e.ids, e.size) == key]
            if not found:
                break
            held += found
        idle = [e for e in self.entries if not e.users and not any(e is h for h in held)]
        idle.sort(key=lambda e: e.idle_since)
        entries = list(self.entries)
        while True:
            free = self.free(entries)
            base = held[0].rank if held else free.index(max(free))
            new = [
                StripedEntry(*key, 0, (0, 0), (base + 2 * i) % self.size)
                for i, key in enumerate(wanted)
            ][len(held) :]
            if min(self.free(entries + new)) >= 0:
                break
            if not idle:
                return None
            entries.remove(idle.pop(0))
        cached = sum(e.size for e in held)
        self.entries = entries + new
        for entry in held + new:
            entry.users += 1
        return held + new, cached

    def release(self, held: list[StripedEntry]) -> None:
        self.clock += 1
        for entry in held:
            entry.users -= 1
            entry.idle_since = (self.clock, -len(entry.ids))


@settings(max_examples=examples(300), deadline=None)
@example(  # the last one fits as long as not all that is idle has been given back
    steps=[((0,), 2), 0, ((0,), 1), ((1, 0), 5), ((0,), 1), ((0,), 1), ((2, 0, 0, 0, 0), 17), 0, 0,
           ((0,), 1), ((1, 0, 0), 9), ((0, 0, 0), 11)],
    size=4,
    each=6,
)  # fmt: skip
@given(steps=steps, size=st.integers(2, 4), each=st.integers(5, 9))
def test_striped_pages_are_those_of_the_slow_model(
    steps: list[object], size: int, each: int
) -> None:
    cache = PrefixCache(size * each, page_size=2, block_tokens=BLOCK, shard_size=size)
    slow = SlowStripedCache(size, each)
    leases: list[tuple[Lease, list[StripedEntry]]] = []
    for step in steps:
        if isinstance(step, int):
            if leases:
                lease, entries = leases.pop(step % len(leases))
                cache.release(lease)
                slow.release(entries)
        else:
            lease, expected = cache.acquire(*step), slow.acquire(*step)
            assert (lease is None) == (expected is None)
            if lease is not None and expected is not None:
                entries, cached = expected
                assert lease.cached_tokens == cached
                assert lease.page_ids[0] % size == entries[0].rank
                turns = (lease.page_ids - np.arange(len(lease.page_ids))) % size
                assert len(set(turns.tolist())) == 1  # the ranks in turn
                leases.append((lease, entries))
        assert cache.num_free_pages == sum(slow.free(slow.entries))
        pages = {p for lease, _ in leases for p in lease.page_ids.tolist()}
        pages |= {p for block in cache._idle.values() for p in block.page_ids}
        assert len(pages) == size * each - cache.num_free_pages
        assert all(size <= page < size * (each + 1) for page in pages)


def test_a_shared_prefix_is_shared_page_for_page() -> None:
    cache = PrefixCache(16, page_size=2, block_tokens=BLOCK)
    a, b = cache.acquire([1, 2, 3], 12), cache.acquire([1, 2, 9], 11)
    assert a is not None
    assert b is not None
    assert (a.cached_tokens, b.cached_tokens) == (0, 8)
    np.testing.assert_array_equal(a.page_ids[:4], b.page_ids[:4])
    assert not set(a.page_ids[4:].tolist()) & set(b.page_ids[4:].tolist())
    assert cache.num_free_pages == 16 - 8


def test_the_same_hash_behind_another_prefix_is_another_block() -> None:
    cache = PrefixCache(8, page_size=BLOCK, block_tokens=BLOCK)
    a, b = cache.acquire([1, 5], 8), cache.acquire([2, 5], 8)
    assert a is not None
    assert b is not None
    assert b.cached_tokens == 0
    assert a.page_ids[1] != b.page_ids[1]


def test_a_partial_block_is_found_only_at_its_length() -> None:
    cache = PrefixCache(8, page_size=2, block_tokens=BLOCK)
    cache.acquire([1, 2], 6)
    cached = [cache.acquire([1, 2], n) for n in (6, 7)]
    assert [lease and lease.cached_tokens for lease in cached] == [6, 4]


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache(4, page_size=BLOCK, block_tokens=BLOCK)
    for ids in ([1, 2], [3, 4], [1, 2]):  # the second use makes 1, 2 the younger ones
        lease = cache.acquire(ids, 8)
        assert lease is not None
        cache.release(lease)
    lease = cache.acquire([7], 4)  # one page: the leaf 4 goes, its parent 3 stays
    assert lease is not None
    cache.release(lease)
    assert cache.evictions == 1
    hits = {}
    for ids in ([1, 2], [3, 4]):
        lease = cache.acquire(ids, 8)
        assert lease is not None
        hits[tuple(ids)] = lease.cached_tokens
        cache.release(lease)
    assert hits == {(1, 2): 8, (3, 4): 4}


def test_a_full_pool_waits_and_a_small_one_refuses() -> None:
    cache = PrefixCache(4, page_size=2, block_tokens=BLOCK)
    first = cache.acquire([1], 4)
    assert first is not None
    assert cache.acquire([2, 3], 8) is None
    assert cache.num_free_pages == 2  # a refusal changes nothing
    cache.release(first)
    assert cache.acquire([2, 3], 8) is not None
    with pytest.raises(ValueError, match="9 tokens needs 5 pages of 2, the pool has 4"):
        cache.acquire([4, 5, 6], 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 4), "num_pages must be >= 1, got 0"),
        ((4, 0, 4), "page_size must be >= 1, got 0"),
        ((4, 3, 4), "page_size must divide the 4 tokens of a hash block, got 3"),
        ((4, 8, 4), "page_size must divide the 4 tokens of a hash block, got 8"),
    ],
)
def test_bad_sizes_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    num_pages, page_size, block_tokens = arguments
    with pytest.raises(ValueError, match=message):
        PrefixCache(num_pages, page_size=page_size, block_tokens=block_tokens)


def test_ranks_must_have_as_many_pages() -> None:
    with pytest.raises(ValueError, match="num_pages must be a multiple of shard_size 3, got 8"):
        PrefixCache(8, page_size=2, block_tokens=BLOCK, shard_size=3)
    with pytest.raises(ValueError, match="shard_size must be >= 1, got 0"):
        PrefixCache(8, page_size=2, block_tokens=BLOCK, shard_size=0)
