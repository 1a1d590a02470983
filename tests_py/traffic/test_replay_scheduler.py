# SPDX-License-Identifier: Apache-2.0
"""Prefill batches: budgets, chunks, and K/V that are written before they are read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.traffic.prefix_cache import PrefixCache
from cpattn.traffic.scheduler import Batch, prefill_batches
from cpattn.traffic.trace import Request, generate_trace, scale_lengths, unbounded_hits
from support.examples import examples

BLOCK = 4


def request(ids: list[int], num_tokens: int) -> Request:
    return Request(0, num_tokens, 1, tuple(ids))


requests_of = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5).flatmap(
        lambda ids: st.builds(
            request, st.just(ids), st.integers((len(ids) - 1) * BLOCK + 1, len(ids) * BLOCK)
        )
    ),
    min_size=1,
    max_size=25,
)


def text(r: Request, position: int) -> tuple[object, ...]:
    """All that K/V at a position depend on: the tokens up to it."""
    return (r.hash_ids[: position // BLOCK + 1], position)


@settings(max_examples=examples(200), deadline=None)
@given(
    requests=requests_of,
    token_budget=st.integers(1, 30),
    page_size=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 30),
    max_sequences=st.integers(1, 6),
)
def test_every_query_finds_its_own_prefix(requests, token_budget, page_size, spare, max_sequences):
    cache = PrefixCache(20 // page_size + spare, page_size=page_size, block_tokens=BLOCK)
    pool: dict[int, object] = {}  # slot -> what was written there
    computed = [0] * len(requests)
    for batch in prefill_batches(
        requests, cache, token_budget=token_budget, max_sequences=max_sequences
    ):
        assert 0 < batch.num_tokens <= token_budget
        assert 0 < len(batch.chunks) <= max_sequences
        run(batch, pool, page_size)
        for chunk in batch.chunks:
            r, before = chunk.request, computed[chunk.request_index]
            assert chunk.begin == (before or min(chunk.lease.cached_tokens, r.input_length - 1))
            computed[chunk.request_index] = chunk.end
    assert computed == [r.input_length for r in requests]
    assert cache.num_free_pages + cache.num_idle_pages == cache.num_pages


def run(batch: Batch, pool: dict[int, object], page_size: int) -> None:
    """Write, then read, as one layer does."""
    slots = iter(batch.slots.tolist())
    written = []
    for chunk in batch.chunks:
        for position in range(chunk.begin, chunk.end):
            slot = next(slots)
            if slot >= 0:
                pool[slot] = text(chunk.request, position)
                written.append(slot)
    assert len(set(written)) == len(written)
    assert next(slots, None) is None
    for chunk, pages in zip(batch.chunks, batch.block_tables, strict=True):
        for position in range(chunk.end):
            slot = int(pages[position // page_size]) * page_size + position % page_size
            assert pool[slot] == text(chunk.request, position)


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


def test_a_long_prompt_is_computed_in_chunks():
    cache = PrefixCache(10, page_size=4, block_tokens=BLOCK)
    batches = list(
        prefill_batches([request([1, 2, 3, 4], 14), request([5], 3)], cache, token_budget=6)
    )
    assert [batch.extend_lens for batch in batches] == [[6], [6], [2, 3]]
    assert [batch.prefix_lens for batch in batches] == [[0], [6], [12, 0]]
    assert [batch.seq_lens for batch in batches] == [[6], [12], [14, 3]]
    first = batches[2].chunks[0]
    assert (first.is_first, first.is_last) == (False, True)
    np.testing.assert_array_equal(batches[2].block_tables[1, 1:], -1)


def test_a_fully_cached_prompt_computes_its_last_token_and_writes_nothing():
    cache = PrefixCache(10, page_size=2, block_tokens=BLOCK)
    prompt = request([1, 2], 7)
    (batch,) = prefill_batches([prompt, prompt], cache, token_budget=100)
    assert batch.extend_lens == [7, 1]
    assert batch.prefix_lens == [0, 6]
    assert batch.slots[-1] == -1
    assert (batch.slots[:-1] >= 0).all()


def test_a_batch_ends_where_the_pool_does():
    cache = PrefixCache(4, page_size=4, block_tokens=BLOCK)
    requests = [request([i, i + 10], 8) for i in range(5)]
    batches = list(prefill_batches(requests, cache, token_budget=100))
    assert [len(batch.chunks) for batch in batches] == [2, 2, 1]
    assert cache.evictions == 6


def test_what_can_never_run_is_refused_before_anything_runs():
    cache = PrefixCache(2, page_size=4, block_tokens=BLOCK)
    requests = [request([1], 4), request([1, 2, 3], 9)]
    with pytest.raises(ValueError, match="request 1 has 9 tokens, the pool 8"):
        next(prefill_batches(requests, cache, token_budget=4))
