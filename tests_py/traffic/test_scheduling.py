# SPDX-License-Identifier: Apache-2.0
"""The prefix cache agrees with a slow model. In batches of requests that come and go, K/V are
written before they are read, and blocks are named when they are known."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpattn.scheduling import PrefixCache, Request, Scheduler, hash_blocks, prefill_batches
from cpattn.scheduling.prefix_cache import Lease
from cpattn_lab.traffic.trace import generate_trace, scale_lengths, unbounded_hits
from support.examples import examples

BLOCK = 4


# Hashes are few and prompts short, so prefixes often collide, also after different parents.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).flatmap(
    lambda ids: st.tuples(
        st.just(tuple(ids)), st.integers((len(ids) - 1) * BLOCK + 1, len(ids) * BLOCK)
    )
)
steps = st.lists(st.one_of(prompts, st.integers(0, 5)), max_size=60)


@dataclass
class Entry:
    """A cached block whose first page is on rank `rank`."""

    ids: tuple[int, ...]  # hashes up to this block
    size: int  # number of tokens
    rank: int
    users: int = 0
    idle_since: tuple[int, int] = (0, 0)  # (release, -depth): the deepest of a release is oldest


class SlowCache:
    """LRU that searches, over blocks of two pages on `size` ranks, which have `each` pages."""

    def __init__(self, size: int, each: int) -> None:
        self.size, self.each = size, each
        self.entries: list[Entry] = []
        self.clock = 0

    def free(self, entries: list[Entry]) -> list[int]:
        free = [self.each] * self.size
        for entry in entries:
            for page in range(-(-entry.size // 2)):
                free[(entry.rank + page) % self.size] -= 1
        return free

    def acquire(self, ids: tuple[int, ...], num_tokens: int) -> tuple[list[Entry], int] | None:
        wanted = [(ids[: i + 1], min(BLOCK, num_tokens - i * BLOCK)) for i in range(len(ids))]
        held: list[Entry] = []
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
            new = [Entry(*key, (base + 2 * i) % self.size) for i, key in enumerate(wanted)]
            new = new[len(held) :]
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

    def release(self, held: list[Entry]) -> None:
        self.clock += 1
        for entry in held:
            entry.users -= 1
            entry.idle_since = (self.clock, -len(entry.ids))


@settings(max_examples=examples(300), deadline=None)
@example(  # the last prompt fits before all idle blocks have been given back
    steps=[((0,), 2), 0, ((0,), 1), ((1, 0), 5), ((0,), 1), ((0,), 1), ((2, 0, 0, 0, 0), 17), 0, 0,
           ((0,), 1), ((1, 0, 0), 9), ((0, 0, 0), 11)],
    size=4,
    each=6,
)  # fmt: skip
@given(steps=steps, size=st.integers(1, 4), each=st.integers(5, 9))
def test_behaves_as_the_slow_model(steps, size, each):
    each *= 3 if size == 1 else 1
    cache, slow = (
        PrefixCache(size * each, page_size=2, block_tokens=BLOCK, shard_size=size),
        SlowCache(size, each),
    )
    leases: list[tuple[Lease, list[Entry]]] = []
    content: dict[int, object] = {}  # page -> the key last written to it
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
                assert len(set(turns.tolist())) == 1  # pages lie on the ranks in turn
                for page, key in zip(lease.page_ids.tolist(), keys(entries), strict=True):
                    assert content.get(page) == key or key[0] * 2 >= cached, "still what it wrote"
                    content[page] = key
                leases.append((lease, entries))
        assert cache.num_free_pages == sum(slow.free(slow.entries))
        idle = [p for block in cache._idle.values() for p in block.page_ids]
        assert len(set(idle)) == len(idle) == cache.num_idle_pages
        pages = {p for lease, _ in leases for p in lease.page_ids.tolist()}
        assert not pages & set(idle)
        assert len(pages) + len(idle) == size * each - cache.num_free_pages
        assert all(size <= page < size * (each + 1) for page in (*pages, *idle))
    for lease, entries in leases:
        assert [content[page] for page in lease.page_ids.tolist()] == keys(entries)


def keys(entries: list[Entry]) -> list[Any]:
    """List the content of each page of these blocks: its place in the prompt, and the prefix."""
    pages = [(e.ids, e.size, page) for e in entries for page in range(-(-e.size // 2))]
    return [(i, *page) for i, page in enumerate(pages)]


def test_a_small_pool_refuses():
    with pytest.raises(ValueError, match="9 tokens needs 5 pages of 2, the pool has 4"):
        PrefixCache(4, page_size=2, block_tokens=BLOCK).acquire([4, 5, 6], 9)


def request(ids: list[int], num_tokens: int) -> Request:
    return Request(0, num_tokens, 1, tuple(ids))


def test_hits_do_not_depend_on_the_batches():
    requests, block_tokens = scale_lengths(generate_trace(120, seed=1), 8), 64
    expected = list(unbounded_hits(requests, block_tokens))
    for token_budget in (100, 1000, 100_000):
        cache = PrefixCache(8000, page_size=16, block_tokens=block_tokens)
        hits = [0] * len(requests)
        for batch in prefill_batches(requests, cache, token_budget=token_budget):
            for chunk in batch.chunks:
                hits[chunk.request_index] = chunk.lease.cached_tokens
        assert hits == expected
        assert cache.evictions == 0


def test_a_batch_ends_where_the_pool_does():
    cache = PrefixCache(4, page_size=4, block_tokens=BLOCK)
    requests = [request([i, i + 10], 8) for i in range(5)]
    batches = list(prefill_batches(requests, cache, token_budget=100))
    assert [len(batch.chunks) for batch in batches] == [2, 2, 1]
    assert cache.evictions == 6


def test_what_can_never_run_is_refused_before_anything_runs():
    cache = PrefixCache(2, page_size=4, block_tokens=BLOCK)
    requests = [request([1], 4), request([1, 2, 3], 9)]
    message = "^prefill_batches: request 1: a prompt of 9 tokens needs 3 pages of 4, the pool has 2"
    with pytest.raises(ValueError, match=message):
        next(prefill_batches(requests, cache, token_budget=4))


@pytest.mark.parametrize(
    ("ids", "num_tokens", "reserve", "message"),
    [
        ([1, 2, 3], 9, 0, "a prompt of 9 tokens needs 3 pages of 4, the pool has 2"),
        ([1, 2], 8, 1, "a prompt of 8 tokens and 1 behind it needs 3 pages of 4, the pool has 2"),
        ([1], 5, 2, "hash_ids must be 2 for a prompt of 5 tokens in blocks of 4, got 1"),
        ([], 0, 1, "input_length must be >= 1, got 0"),
        ([1], 4, -1, "reserve must be >= 0, got -1"),
    ],
)
def test_a_refused_request_leaves_the_others_alone(ids, num_tokens, reserve, message):
    scheduler = Scheduler(PrefixCache(2, page_size=4, block_tokens=BLOCK), token_budget=16)
    scheduler.add(0, request([1], 4))
    with pytest.raises(ValueError, match=f"^Scheduler: request 1: {message}"):
        scheduler.add(1, request(ids, num_tokens), reserve=reserve)
    assert scheduler.next_batch().extend_lens == [4]


def test_prompts_that_wait_for_leases_of_others_are_told_last():
    cache = PrefixCache(2, page_size=4, block_tokens=BLOCK)
    assert cache.acquire([9], 4)
    batches = prefill_batches([request([1], 4), request([2, 3], 8)], cache, token_budget=16)
    assert next(batches).extend_lens == [4]
    with pytest.raises(ValueError, match=r"^prefill_batches: request 1 waits for pages"):
        next(batches)


def request_of(tokens: list[int]) -> Request:
    return Request(0, len(tokens), 1, hash_blocks(tokens, BLOCK))


def test_what_was_generated_is_found_by_the_next_prompt():
    cache = PrefixCache(8, page_size=BLOCK, block_tokens=BLOCK)
    scheduler = Scheduler(cache, token_budget=16)
    scheduler.add(0, request_of([1, 2, 3, 4, 5]), reserve=5)
    assert scheduler.next_batch().extend_lens == [5]
    for length in range(5, 9):
        batch = scheduler.next_batch(ready=[0])
        assert (batch.extend_lens, batch.prefix_lens) == ([1], [length])
    whole = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    scheduler.end(0, written=9, hash_ids=hash_blocks(whole[:8], BLOCK))
    assert (cache.num_idle_pages, cache.num_free_pages) == (2, 6)  # all others are free
    scheduler.add(1, request_of([*whole, 10]))
    assert scheduler.next_batch().prefix_lens == [8]


def test_what_was_not_written_is_not_found():
    cache = PrefixCache(8, page_size=BLOCK, block_tokens=BLOCK)
    scheduler = Scheduler(cache, token_budget=6)
    tokens = list(range(16))
    scheduler.add(0, request_of(tokens))
    scheduler.add(1, request_of(tokens))  # it waits until the first is whole
    assert scheduler.next_batch().extend_lens == [6]
    scheduler.end(0, written=6)  # its client has left
    batch = scheduler.next_batch()
    assert (batch.prefix_lens, batch.extend_lens) == ([4], [6])
    scheduler.end(1, written=10)
    assert cache.num_idle_pages + cache.num_free_pages == cache.num_pages
    scheduler.end(1)  # it has gone already


def test_the_same_tokens_twice_are_kept_once():
    cache = PrefixCache(8, page_size=BLOCK, block_tokens=BLOCK)
    leases = [cache.acquire([None, None], 8) for _ in range(2)]
    for lease in leases:
        cache.release(lease, hash_ids=(7, 8))
    assert (cache.num_idle_pages, cache.num_free_pages) == (2, 6)


def test_places_and_pages_are_kept_for_those_that_have_begun():
    cache = PrefixCache(4, page_size=BLOCK, block_tokens=BLOCK)
    scheduler = Scheduler(cache, token_budget=16, max_sequences=2)
    for i in range(3):
        scheduler.add(i, request_of([i] * 3), reserve=1)
    assert scheduler.next_batch().extend_lens == [3, 3]
    assert scheduler.next_batch() is None  # the third has no place
    scheduler.end(0)
    scheduler.end(1)
    scheduler.add(3, request_of([9] * 12))
    assert scheduler.next_batch().extend_lens == [3, 12]
    scheduler.add(4, request_of([8]))
    scheduler.end(4)
    assert scheduler.next_batch() is None


@settings(max_examples=examples(200))
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=25),
    more=st.sampled_from([0, 0, 1, 6]),
    budget=st.integers(1, 30),
    max_sequences=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 30),
    ranks=st.sampled_from([1, 2]),
)
def test_every_token_is_computed_once_behind_all_before_it(
    prompts, more, budget, max_sequences, page_size, spare, ranks
):
    num_pages = 32 // page_size + ranks * spare
    cache = PrefixCache(num_pages, page_size=page_size, block_tokens=BLOCK, shard_size=ranks)
    scheduler = Scheduler(cache, token_budget=budget, max_sequences=max_sequences)
    for i, prompt in enumerate(prompts):
        scheduler.add(i, request_of(prompt), reserve=more)
    pool: dict[int, list[int]] = {}  # slot -> the tokens up to it
    computed = dict.fromkeys(range(len(prompts)), 0)
    tokens = [[*prompt, *[2 + i] * more] for i, prompt in enumerate(prompts)]
    left = set(computed)
    while left:
        ready = [i for i in left if len(prompts[i]) <= computed[i] < len(prompts[i]) + more]
        batch = scheduler.next_batch(ready)
        assert 0 < batch.num_tokens <= budget
        assert 0 < len(batch.chunks) <= max_sequences
        slots, written = iter(batch.slots.tolist()), []
        for chunk in batch.chunks:
            i, request = chunk.request_index, chunk.request
            cached = min(chunk.lease.cached_tokens, request.input_length - 1)
            assert chunk.begin == (computed[i] or cached)
            assert chunk.is_first == (computed[i] == 0)
            for position in range(chunk.begin, chunk.end):
                slot = next(slots)
                if slot >= 0:
                    pool[slot] = tokens[i][: position + 1]
                    written.append(slot)
            computed[i] = chunk.end
        assert len(set(written)) == len(written)
        assert next(slots, None) is None
        for chunk, table in zip(batch.chunks, batch.block_tables, strict=True):
            for position in range(chunk.end):
                slot = int(table[position // page_size]) * page_size + position % page_size
                assert pool[slot] == tokens[chunk.request_index][: position + 1]
        for i in [i for i in left if computed[i] == len(tokens[i])]:
            full = hash_blocks(tokens[i][: len(tokens[i]) // BLOCK * BLOCK], BLOCK)
            scheduler.end(i, written=computed[i], hash_ids=full)
            left.remove(i)
    assert cache.num_idle_pages + cache.num_free_pages == cache.num_pages


def test_wrong_numbers_are_refused():
    cache = PrefixCache(4, page_size=BLOCK, block_tokens=BLOCK)
    with pytest.raises(ValueError, match="Scheduler: token_budget"):
        Scheduler(cache, token_budget=0)
    with pytest.raises(TypeError, match="Scheduler: cache"):
        Scheduler(None, token_budget=1)
    with pytest.raises(ValueError, match="hash_blocks: block_tokens"):
        hash_blocks([1], 0)
    with pytest.raises(TypeError, match="hash_blocks: token_ids must be integers, got float64"):
        hash_blocks([1.2], 1)
