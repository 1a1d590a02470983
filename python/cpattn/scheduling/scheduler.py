# SPDX-License-Identifier: Apache-2.0
"""Batches under a token budget: chunks of prompts after cached prefixes, and generated tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._limits import check_integer, check_kind
from .prefix_cache import Lease, PrefixCache
from .request import Request, checked_requests


@dataclass(frozen=True)
class Chunk:
    """Part of a request that one batch computes: tokens `begin` to `end` - 1, after a prefix.

    Attributes
    ----------
    request_index : int
        Index of `request` among all given requests.
    request : Request
    lease : Lease
        Pages of the whole prompt and of tokens that may follow.
    begin, end : int
        Positions within the prompt, or beyond it for generated tokens.

    Examples
    --------
    >>> cache = PrefixCache(8, page_size=4, block_tokens=8)
    >>> batches = prefill_batches([Request(0, 10, 1, (0, 1))], cache, token_budget=6)
    >>> [(chunk.begin, chunk.end) for batch in batches for chunk in batch.chunks]
    [(0, 6), (6, 10)]
    """

    request_index: int
    request: Request
    lease: Lease
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in this chunk."""
        return self.end - self.begin

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends its prompt."""
        return self.end == self.request.input_length

    @property
    def is_first(self) -> bool:
        """Whether the chunk begins its prompt, after the cached tokens."""
        return self.begin == _first_token(self.request, self.lease)

    @property
    def has_next(self) -> bool:
        """Whether the last token of the chunk sees its whole request and predicts the next."""
        return self.end >= self.request.input_length


@dataclass(frozen=True)
class Batch:
    """One forward pass, with the arrays that an engine gives to its attention backend.

    Attributes
    ----------
    index : int
        The number of the batch.
    chunks : tuple of Chunk
        A chunk for each sequence.
    extend_lens, prefix_lens : list of int
        New tokens of each sequence, and its tokens in the pool before this pass.
    block_tables : array [sequences, pages of the longest], int32
        Page ids of each sequence, -1 after its last page.
    slots : array [new tokens], int64
        Pool slot for the keys and values of each new token; -1 if the pool has them already.

    Examples
    --------
    >>> cache = PrefixCache(8, page_size=4, block_tokens=8)
    >>> requests = [Request(0, 10, 1, (0, 1)), Request(1, 9, 1, (0, 2))]
    >>> (batch,) = prefill_batches(requests, cache, token_budget=64)
    >>> batch.extend_lens, batch.seq_lens, batch.hit_tokens     # eight tokens are shared
    ([10, 1], [10, 9], 8)
    """

    index: int
    chunks: tuple[Chunk, ...]
    extend_lens: list[int]  # new tokens of each sequence
    prefix_lens: list[int]  # tokens in the pool before this pass
    block_tables: npt.NDArray[np.int32]  # [sequences, pages of the longest], -1 beyond the end
    slots: npt.NDArray[np.int64]  # [new tokens]; -1: K/V are in the pool already

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence after this pass."""
        return [chunk.end for chunk in self.chunks]

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.extend_lens)

    @property
    def hit_tokens(self) -> int:
        """Number of tokens that prompts beginning in this batch need not compute."""
        return sum(chunk.begin for chunk in self.chunks if chunk.is_first)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each new token within its sequence."""
        return np.concatenate([np.arange(chunk.begin, chunk.end) for chunk in self.chunks])


def prefill_batches(
    requests: Sequence[Request],
    cache: PrefixCache,
    *,
    token_budget: int,
    max_sequences: int = 64,
) -> Iterator[Batch]:
    """Form batches of at most `token_budget` new tokens, first come first served.

    A prompt that does not fit into the budget is cut; its remainder comes first in the next batch
    (chunked prefill). A fully cached prompt still computes its last token, whose output the sampler
    needs, but does not write it. Asking for the next batch releases the leases of finished prompts,
    so the caller must run a batch before it asks for another.

    Parameters
    ----------
    requests : sequence of Request
    cache : PrefixCache
        Cache whose pages the prompts take.
    token_budget : int
        Most new tokens of a batch.
    max_sequences : int
        Most sequences of a batch.

    Returns
    -------
    iterator of Batch

    Raises
    ------
    TypeError
        If `requests` has no Requests, `cache` is no PrefixCache, or a number is no integer.
    ValueError
        If a number is below 1, a prompt has more tokens than the pool, or its hashes are not one
        for each block: asking for the first batch raises it. It is also raised if a prompt waits
        for pages that leases of others hold.

    Examples
    --------
    >>> cache = PrefixCache(8, page_size=4, block_tokens=8)
    >>> requests = [Request(0, 10, 1, (0, 1)), Request(1, 9, 1, (0, 2))]
    >>> batches = prefill_batches(requests, cache, token_budget=8)
    >>> [batch.extend_lens for batch in batches]     # the first prompt is cut
    [[8], [2, 1]]
    """
    check_kind("prefill_batches", "cache", cache, PrefixCache)
    scheduler = Scheduler(
        cache, token_budget=token_budget, max_sequences=max_sequences, function="prefill_batches"
    )
    for i, request in enumerate(checked_requests("prefill_batches", requests)):
        scheduler.add(i, request)
    while batch := scheduler.next_batch():
        yield batch
        for chunk in batch.chunks:
            if chunk.is_last:
                scheduler.end(chunk.request_index)
    if scheduler._waiting:
        raise ValueError(
            f"prefill_batches: request {scheduler._waiting[0][0]} waits for pages that other "
            "leases of the cache hold: release some"
        )


class Scheduler:
    """Requests in progress, and batches of their tokens, first come first served.

    A batch has the next tokens of all requests named as ready, then chunks of prompts up to the
    budget. A request takes the pages of its prompt and of its reserve when it begins, so it never
    waits for pages later. At most one prompt at a time is cut, and later prompts wait for it, so
    cached blocks are written before another request reads them.

    Parameters
    ----------
    cache : PrefixCache
        Cache whose pages the requests take.
    token_budget : int
        Most new tokens of a batch.
    max_sequences : int
        Most requests that have begun and not ended.
    function : str
        Function name in error messages.

    Raises
    ------
    TypeError, ValueError
        If a number is no integer or below 1, or `cache` is no PrefixCache.

    Examples
    --------
    >>> cache = PrefixCache(8, page_size=4, block_tokens=4)
    >>> scheduler = Scheduler(cache, token_budget=8)
    >>> scheduler.add(0, Request(0, 5, 3, (7, 8)), reserve=2)
    >>> scheduler.add(1, Request(0, 9, 1, (7, 9, 10)))
    >>> batch = scheduler.next_batch()
    >>> batch.extend_lens, [chunk.has_next for chunk in batch.chunks]
    ([5, 3], [True, False])
    >>> batch = scheduler.next_batch(ready=[0])      # a token of the first, the rest of the second
    >>> batch.extend_lens, batch.prefix_lens
    ([1, 2], [5, 7])
    >>> scheduler.end(0)
    >>> scheduler.end(1)
    >>> scheduler.next_batch() is None
    True
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        token_budget: int,
        max_sequences: int = 64,
        function: str = "Scheduler",
    ) -> None:
        check_integer(function, "token_budget", token_budget)
        check_integer(function, "max_sequences", max_sequences)
        check_kind(function, "cache", cache, PrefixCache)
        self.cache = cache
        self.token_budget = token_budget
        self.max_sequences = min(max_sequences, token_budget)
        self._function = function
        self._waiting: deque[tuple[int, Request, int]] = deque()
        self._begun: dict[int, Chunk] = {}  # last chunk of each request, in order of beginning
        self._num_batches = 0

    def add(self, index: int, request: Request, *, reserve: int = 0) -> None:
        """Queue a request.

        Parameters
        ----------
        index : int
            Number of the request, different from those of all other requests in progress.
        request : Request
            Prompt, with a hash for each of its blocks.
        reserve : int
            Tokens after the prompt whose K/V will be written. With a reserve, no other prompt
            shares the last block of the prompt unless the prompt fills it.

        Raises
        ------
        TypeError, ValueError
            If the prompt has no tokens, does not have a hash for each block, or does not fit into
            the pool with its reserve.
        """
        where = f"{self._function}: request {index}"
        check_integer(where, "input_length", request.input_length)
        check_integer(where, "reserve", reserve, 0)
        self.cache._check(where, request.hash_ids, request.input_length, reserve)
        self._waiting.append((index, request, reserve))

    def end(self, index: int, *, written: int | None = None, hash_ids: Sequence[int] = ()) -> None:
        """Release a request's pages (see `PrefixCache.release`), or remove it from the queue."""
        chunk = self._begun.pop(index, None)
        if chunk is None:
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != index)
        else:
            self.cache.release(chunk.lease, written=written, hash_ids=hash_ids)

    def next_batch(self, ready: Iterable[int] = ()) -> Batch | None:
        """Form the next batch, or return None if no token can be computed.

        The caller runs each batch, and ends requests, before it asks for the next batch.

        Parameters
        ----------
        ready : ints
            Requests with finished prompts whose next token is known: one token each.
        """
        last = [self._begun[index] for index in ready]
        chunks = [replace(chunk, begin=chunk.end, end=chunk.end + 1) for chunk in last]
        room = self.token_budget - len(chunks)
        unfinished = next((c for c in reversed(self._begun.values()) if not c.has_next), None)
        while room > 0 and (unfinished or self._waiting):
            if unfinished:
                end = min(unfinished.end + room, unfinished.request.input_length)
                chunk = replace(unfinished, begin=unfinished.end, end=end)
            else:
                if len(self._begun) >= self.max_sequences:
                    break
                index, request, reserve = self._waiting[0]
                lease = self._lease(request, reserve)
                if lease is None:  # other requests hold the pages until they end
                    break
                self._waiting.popleft()
                begin = _first_token(request, lease)
                end = min(begin + room, request.input_length)
                chunk = Chunk(index, request, lease, begin, end)
            chunks.append(chunk)
            self._begun[chunk.request_index] = chunk
            room -= chunk.num_tokens
            unfinished = None if chunk.is_last else chunk
        self._begun.update((chunk.request_index, chunk) for chunk in chunks)
        if not chunks:
            return None
        self._num_batches += 1
        return _make_batch(self._num_batches - 1, chunks, self.cache.page_size)

    def _lease(self, request: Request, reserve: int) -> Lease | None:
        if not reserve:
            return self.cache.acquire(request.hash_ids, request.input_length)
        num_tokens, size = request.input_length + reserve, self.cache.block_tokens
        known = request.hash_ids[: request.input_length // size]
        return self.cache.acquire(
            [*known, *[None] * (-(-num_tokens // size) - len(known))], num_tokens
        )


def _first_token(request: Request, lease: Lease) -> int:
    return min(lease.cached_tokens, request.input_length - 1)


def _make_batch(index: int, chunks: Sequence[Chunk], page_size: int) -> Batch:
    tables = [chunk.lease.page_ids for chunk in chunks]
    block_tables = np.full((len(chunks), max(map(len, tables))), -1, dtype=np.int32)
    slots = []
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        block_tables[row, : len(table)] = table
        position = np.arange(chunk.begin, chunk.end)
        slot = table[position // page_size].astype(np.int64) * page_size + position % page_size
        # A shared page is never written again, not even with the same values.
        slots.append(np.where(position < chunk.lease.cached_tokens, -1, slot))
    return Batch(
        index=index,
        chunks=tuple(chunks),
        extend_lens=[chunk.num_tokens for chunk in chunks],
        prefix_lens=[chunk.begin for chunk in chunks],
        block_tables=block_tables,
        slots=np.concatenate(slots),
    )
