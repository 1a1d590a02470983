# SPDX-License-Identifier: Apache-2.0
"""Handover of prompts: selects pages to send from the prefill pool to the decode pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpattn.scheduling.prefix_cache import Lease, PrefixCache
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch, Chunk


@dataclass(frozen=True)
class Continuation:
    """Prompt to continue by decoding, once the batch with its last token is delivered."""

    request_index: int
    prompt_tokens: int
    num_tokens: int  # number of tokens to decode; prefill computes the first one
    page_ids: npt.NDArray[np.int32]  # pages of the decode pool: the prompt's, then empty ones
    slot: int  # slot of the aux buffer for the first token
    row: int  # row of the prompt's last token in the batch


@dataclass(frozen=True)
class Delivery:
    """Pages and continuations that one batch adds to the decode pool."""

    src_pages: npt.NDArray[np.int32]  # pages of the prefill pool
    dst_pages: npt.NDArray[np.int32]  # pages of the decode pool
    continuations: tuple[Continuation, ...]


@dataclass
class _Prompt:
    lease: Lease
    num_tokens: int
    sent: int  # leading tokens that the decode pool has, a multiple of the page size or all
    slot: int


class Handover:
    """Pages and aux slots of the decode pool, and the number of sent tokens of each prompt.

    Prompts share pages of equal full blocks in the decode pool, as in the prefill pool: a page that
    it already has is not sent again. The pages after them, which decoding fills, belong to one
    prompt.
    """

    def __init__(self, cache: PrefixCache, *, decode_tokens: int, num_slots: int) -> None:
        self.cached_tokens = 0  # tokens of all prompts that need not be sent
        self._cache = cache
        self._decode_tokens = decode_tokens
        self._slots = list(range(num_slots - 1, -1, -1))
        self._prompts: dict[int, _Prompt] = {}

    def reserve(self, chunk: Chunk) -> bool:
        """Take pages for the prompt of `chunk`; return False if too few are free now."""
        if chunk.request_index in self._prompts:
            return True
        request, block = chunk.request, self._cache.block_tokens
        num_tokens = min(self._decode_tokens, max(request.output_length, 1))
        total = request.input_length + num_tokens - 1  # the last token's K/V are never needed
        shared = request.hash_ids[: request.input_length // block]
        own = -(-total // block) - len(shared)
        lease = self._cache.acquire((*shared, *[-1 - chunk.request_index] * own), total)
        if lease is None:
            return False
        self.cached_tokens += lease.cached_tokens
        self._prompts[chunk.request_index] = _Prompt(
            lease, num_tokens, lease.cached_tokens, self._slots.pop()
        )
        return True

    def deliver(self, batch: Batch) -> Delivery:
        """Return what to send after `batch`, whose prompts are all reserved.

        Before the last chunk of a prompt only whole pages are sent; a partial one waits.
        """
        sources, destinations, continuations = [], [], []
        ends = np.cumsum(batch.extend_lens)
        page_size = self._cache.page_size
        for chunk, end in zip(batch.chunks, ends.tolist(), strict=True):
            prompt = self._prompts[chunk.request_index]
            until = chunk.end if chunk.is_last else chunk.end // page_size * page_size
            pages = slice(prompt.sent // page_size, -(-until // page_size))
            sources.append(chunk.lease.page_ids[pages])
            destinations.append(prompt.lease.page_ids[pages])
            prompt.sent = max(prompt.sent, until)
            if chunk.is_last:
                continuations.append(_continuation(chunk, prompt, end - 1))
        return Delivery(np.concatenate(sources), np.concatenate(destinations), tuple(continuations))

    def release(self, request_index: int) -> None:
        """Free the own pages of a decoded prompt; its shared pages stay cached."""
        prompt = self._prompts.pop(request_index)
        self._cache.release(prompt.lease)
        self._slots.append(prompt.slot)


def decode_pool_pages(
    num_pages: int, *, page_size: int, block_tokens: int, decode_tokens: int, max_sequences: int
) -> int:
    """Return how many pages the prompts of any batch need; prefill needs `num_pages`.

    Prompts share full blocks in the decode pool, too; after them each has at most a partial block
    of its own, and its decoded tokens.
    """
    own = -(-(block_tokens + decode_tokens) // page_size)
    return num_pages + max_sequences * own


def _continuation(chunk: Chunk, prompt: _Prompt, row: int) -> Continuation:
    request: Request = chunk.request
    return Continuation(
        request_index=chunk.request_index,
        prompt_tokens=request.input_length,
        num_tokens=prompt.num_tokens,
        page_ids=prompt.lease.page_ids,
        slot=prompt.slot,
        row=row,
    )
