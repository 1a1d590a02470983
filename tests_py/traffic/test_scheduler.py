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
    cache = PrefixCache(num_pages, page_size=page_size, block_tokens=SIZE, shard_size=ranks)
    scheduler = Scheduler(cache, token_budget=budget, max_sequences=max_sequences)
    for i, prompt in enumerate(prompts):
        scheduler.add(i, request_of(prompt), reserve=more)
    pool: dict[int, list[int]] = {}  # of each slot the tokens up to it
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
