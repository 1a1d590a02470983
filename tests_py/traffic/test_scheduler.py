# SPDX-License-Identifier: Apache-2.0
"""Requests that come and go: batches of tokens and chunks, and blocks named when they are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.scheduling import PrefixCache, Request, Scheduler, hash_blocks
from support.examples import examples

SIZE = 4


def request_of(tokens: list[int]) -> Request:
    return Request(0, len(tokens), 1, hash_blocks(tokens, SIZE))


def test_what_was_generated_is_found_by_the_next_prompt():
    cache = PrefixCache(8, page_size=SIZE, block_tokens=SIZE)
    scheduler = Scheduler(cache, token_budget=16)
    scheduler.add(0, request_of([1, 2, 3, 4, 5]), reserve=5)
    assert scheduler.next_batch().extend_lens == [5]
    for length in range(5, 9):
        batch = scheduler.next_batch(ready=[0])
        assert (batch.extend_lens, batch.prefix_lens) == ([1], [length])
    whole = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    scheduler.end(0, written=9, hash_ids=hash_blocks(whole[:8], SIZE))
    assert (cache.num_idle_pages, cache.num_free_pages) == (2, 6)  # the rest is nobody's
    scheduler.add(1, request_of([*whole, 10]))
    assert scheduler.next_batch().prefix_lens == [8]


def test_what_was_not_written_is_not_found():
    cache = PrefixCache(8, page_size=SIZE, block_tokens=SIZE)
    scheduler = Scheduler(cache, token_budget=6)
    tokens = list(range(16))
    scheduler.add(0, request_of(tokens))
    scheduler.add(1, request_of(tokens))  # waits, until the first is whole
    assert scheduler.next_batch().extend_lens == [6]
    scheduler.end(0, written=6)  # its client has left
    batch = scheduler.next_batch()
    assert (batch.prefix_lens, batch.extend_lens) == ([4], [6])
    scheduler.end(1, written=10)
    assert cache.num_idle_pages + cache.num_free_pages == cache.num_pages
    scheduler.end(1)  # is gone


def test_the_same_tokens_twice_are_kept_once():
    cache = PrefixCache(8, page_size=SIZE, block_tokens=SIZE)
    leases = [cache.acquire([None, None], 8) for _ in range(2)]
    for lease in leases:
        cache.release(lease, hash_ids=(7, 8))
    assert (cache.num_idle_pages, cache.num_free_pages) == (2, 6)


def test_places_and_pages_are_kept_for_those_that_have_begun():
    cache = PrefixCache(4, page_size=SIZE, block_tokens=SIZE)
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


@settings(max_examples=examples(50))
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=6),
    more=st.integers(0, 6),
    budget=st.integers(1, 9),
    ranks=st.sampled_from([1, 2]),
)
def test_every_token_is_computed_once_behind_all_before_it(prompts, more, budget, ranks):
    cache = PrefixCache(16, page_size=SIZE, block_tokens=SIZE, shard_size=ranks)
    scheduler = Scheduler(cache, token_budget=budget, max_sequences=3)
    for i, prompt in enumerate(prompts):
        scheduler.add(i, request_of(prompt), reserve=more)
    written: dict[int, tuple[int, int]] = {}  # of each slot the token and its position
    computed = dict.fromkeys(range(len(prompts)), 0)
    tokens = [[*prompt, *[2 + i] * more] for i, prompt in enumerate(prompts)]
    left = set(computed)
    while left:
        ready = [i for i in left if len(prompts[i]) <= computed[i] < len(prompts[i]) + more]
        batch = scheduler.next_batch(ready)
        assert batch.num_tokens <= budget
        slots = iter(batch.slots.tolist())
        for chunk in batch.chunks:
            i = chunk.request_index
            assert chunk.is_first or chunk.begin == computed[i]
            for position in range(chunk.begin, chunk.end):
                slot = next(slots)
                if slot >= 0:
                    written[slot] = tokens[i][position], position
            computed[i] = chunk.end
        for chunk, table in zip(batch.chunks, batch.block_tables, strict=True):
            i = chunk.request_index
            for position in range(chunk.end):
                slot = int(table[position // SIZE]) * SIZE + position % SIZE
                assert written[slot] == (tokens[i][position], position)
        for i in [i for i in left if computed[i] == len(tokens[i])]:
            full = hash_blocks(tokens[i][: len(tokens[i]) // SIZE * SIZE], SIZE)
            scheduler.end(i, written=computed[i], hash_ids=full)
            left.remove(i)
    assert cache.num_idle_pages + cache.num_free_pages == cache.num_pages


def test_wrong_numbers_are_refused():
    cache = PrefixCache(4, page_size=SIZE, block_tokens=SIZE)
    with pytest.raises(ValueError, match="Scheduler: token_budget"):
        Scheduler(cache, token_budget=0)
    with pytest.raises(TypeError, match="Scheduler: cache"):
        Scheduler(None, token_budget=1)
    with pytest.raises(ValueError, match="hash_blocks: block_tokens"):
        hash_blocks([1], 0)
