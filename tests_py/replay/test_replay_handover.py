# SPDX-License-Identifier: Apache-2.0
"""Pages that go to the decode pool, and when: tokens moved from one pool to another one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch, prefill_batches
from cpattn_lab.replay.disaggregation.handover import (
    Continuation,
    Delivery,
    Handover,
    decode_pool_pages,
)
from cpattn_lab.traffic.trace import block_tokens_of, generate_trace, scale_lengths
from support.examples import examples

PAGE, BLOCK, MAX_SEQUENCES = 4, 8, 6
KINDS = {"block_tokens": BLOCK, "vocab_size": 1 << 40, "seed": 0}


class Pools:
    """Pools of both sides as tokens, and the rule that decodes everything one batch later."""

    def __init__(
        self, requests: list[Request], *, num_pages: int, budget: int, decode: int
    ) -> None:
        sizes = {"page_size": PAGE, "block_tokens": BLOCK}
        pages = decode_pool_pages(
            num_pages, **sizes, decode_tokens=decode, max_sequences=MAX_SEQUENCES
        )
        self.requests = requests
        self.prefill = np.full((num_pages + 1, PAGE), -1)
        self.decode = np.full((pages + 1, PAGE), -1)
        self.decode_cache = PrefixCache(pages, **sizes)
        self.handover = Handover(
            self.decode_cache, decode_tokens=decode, num_slots=2 * MAX_SEQUENCES
        )
        self.running: tuple[Continuation, ...] = ()
        cache = PrefixCache(num_pages, **sizes)
        self._batches = prefill_batches(
            requests, cache, token_budget=budget, max_sequences=MAX_SEQUENCES
        )

    def steps(self) -> Iterator[tuple[Batch, Delivery]]:
        """Each batch, once its pages have been written and sent."""
        for batch in self._batches:
            for chunk in batch.chunks:
                if not self.handover.reserve(chunk):
                    self.release()
                    assert self.handover.reserve(chunk)
            tokens = [block_tokens_of(c.request, c.begin, c.end, **KINDS) for c in batch.chunks]
            written = batch.slots >= 0
            self.prefill.reshape(-1)[batch.slots[written]] = np.concatenate(tokens)[written]
            delivery = self.handover.deliver(batch)
            self.decode[delivery.dst_pages] = self.prefill[delivery.src_pages]
            self.release()
            self.running = delivery.continuations
            yield batch, delivery
        self.release()

    def release(self) -> None:
        for continuation in self.running:
            self.handover.release(continuation.request_index)
        self.running = ()


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 100),
    budget=st.integers(1, 300),
    decode=st.integers(1, 20),
    spare=st.integers(0, 60),
)
def test_every_prompt_is_there_when_its_decoding_begins(seed, budget, decode, spare):
    requests = scale_lengths(generate_trace(10, seed=seed), 64)
    longest = max(-(-request.input_length // PAGE) for request in requests)
    pools = Pools(requests, num_pages=longest + spare, budget=budget, decode=decode)
    done = []
    for batch, delivery in pools.steps():
        assert len(set(delivery.dst_pages.tolist())) == len(delivery.dst_pages)
        own: list[int] = []
        for c in delivery.continuations:
            request = requests[c.request_index]
            tokens = block_tokens_of(request, 0, request.input_length, **KINDS)
            found = pools.decode[c.page_ids].reshape(-1)[: request.input_length]
            np.testing.assert_array_equal(found, tokens)
            assert c.prompt_tokens == request.input_length
            assert c.num_tokens == min(decode, max(request.output_length, 1))
            assert len(c.page_ids) * PAGE >= c.prompt_tokens + c.num_tokens - 1
            assert np.cumsum(batch.extend_lens)[-1] > c.row
            own += c.page_ids[c.prompt_tokens // BLOCK * (BLOCK // PAGE) :].tolist()
            done.append(c.request_index)
        assert len(set(own)) == len(own)  # nobody decodes into the page of another one
        slots = [c.slot for c in delivery.continuations]
        assert len(set(slots)) == len(slots)
    assert done == list(range(len(requests)))
    assert pools.decode_cache.num_free_pages + pools.decode_cache.num_idle_pages == (
        pools.decode_cache.num_pages
    )


@pytest.mark.parametrize("output_length", [0, 1])
def test_prefill_gives_a_token_in_any_case(output_length):
    pools = Pools([Request(0, 8, output_length, (1,))], num_pages=2, budget=8, decode=3)
    ((_, delivery),) = pools.steps()
    (continuation,) = delivery.continuations
    assert continuation.num_tokens == 1
    assert len(continuation.page_ids) == 2
