# SPDX-License-Identifier: Apache-2.0
"""Batches under a token budget: chunks of prompts behind cached prefixes, and tokens after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._limits import check_integer, check_kind
from .prefix_cache import Lease, PrefixCache
from .request import Request, checked_requests


@dataclass(frozen=True)
class Chunk:
    """Tokens begin ... end - 1 of one request, computed in one batch; begin of them are prefix.

    Attributes
    ----------
    request_index : int
        Index of `request` among all that were given.
    request : Request
    lease : Lease
        The pages of the whole prompt, and of what may follow it.
    begin, end : int
        Positions within the prompt; beyond it those of tokens that follow.

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
        """New tokens of this chunk."""
        return self.end - self.begin

    @property
    def is_last(self) -> bool:
        """Whether it ends its prompt."""
        return self.end == self.request.input_length

    @property
    def is_first(self) -> bool:
        """Whether it begins its prompt, behind what was cached."""
        return self.begin == _first_token(self.request, self.lease)

    @property
    def has_next(self) -> bool:
        """Whether its last token has all others of its request before it, and tells the next."""
        return self.end >= self.request.input_length


@dataclass(frozen=True)
class Batch:
    """One forward pass. The arrays are those an engine hands to its attention backend.

    Attributes
    ----------
    index : int
        The number of the batch.
    chunks : tuple of Chunk
        One for each sequence.
    extend_lens, prefix_lens : list of int
        New tokens of each sequence, and those in the pool before this pass.
    block_tables : array [sequences, pages of the longest], int32
        Page ids, -1 beyond the end.
    slots : array [new tokens], int64
        Where keys and values go; -1: they are there already.

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
    slots: npt.NDArray[np.int64]  # [new tokens]: where K/V go; -1: they are there already

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
        """Tokens that prompts beginning here need not compute."""
        return sum(chunk.begin for chunk in self.chunks if chunk.is_first)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each new token, within its sequence."""
        return np.concatenate([np.arange(chunk.begin, chunk.end) for chunk in self.chunks])


def prefill_batches(
    requests: Sequence[Request],
    cache: PrefixCache,
    *,
    token_budget: int,
    max_sequences: int = 64,
) -> Iterator[Batch]:
    """Form batches of at most `token_budget` new tokens, first come first served.

    The prompt that no longer fits is cut: the rest of the budget now, the remainder first in the
    next batch (chunked prefill). A fully cached prompt still computes its last token, whose output
    the sampler needs, but does not write it. Leases of finished prompts are released when the
    next batch is asked for: the caller runs a batch before it goes on.

    Parameters
    ----------
    requests : sequence of Request
    cache : PrefixCache
        Cache whose pages the prompts take.
    token_budget : int
        New tokens of a batch, at most.
    max_sequences : int
        Sequences of a batch, at most.

    Returns
    -------
    iterator of Batch

    Raises
    ------
    TypeError
        For what are no requests or no cache, and a budget or a number that is no integer.
    ValueError
        For one below 1, and a prompt with more tokens than the pool; when the first batch is
        asked for.

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
        if cache.pages_needed(request.input_length) > cache.num_pages:
            raise ValueError(
                f"prefill_batches: request {i} has {request.input_length} tokens, the pool "
                f"{cache.num_pages * cache.page_size}"
            )
        scheduler.add(i, request)
    while batch := scheduler.next_batch():
        yield batch
        for chunk in batch.chunks:
            if chunk.is_last:
                scheduler.end(chunk.request_index)


class Scheduler:
    """Requests that come and go, and the batches of their tokens, first come first served.

    A batch has the next tokens of those that are told to be ready, then chunks of prompts in the
    rest of the budget. Pages of a prompt, and of what may follow it, are taken when it begins, so
    that none that has begun waits for pages. At most one prompt at a time is cut, and those behind
    it wait: so cached blocks of others are written before they are read.

    Parameters
    ----------
    cache : PrefixCache
        Cache whose pages the requests take.
    token_budget : int
        New tokens of a batch, at most.
    max_sequences : int
        Requests that have begun and not ended, at most.
    function : str
        Name in errors.

    Raises
    ------
    TypeError, ValueError
        For numbers that are no integers, or below 1, and what is no cache.

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
        self._waiting: deque[tuple[int, Request, int]] = deque()
        self._begun: dict[int, Chunk] = {}  # the last chunk of each request, in their order
        self._num_batches = 0

    def add(self, index: int, request: Request, *, reserve: int = 0) -> None:
        """Let a request wait for its turn.

        Parameters
        ----------
        index : int
            Its number, unlike those of others that are here.
        request : Request
            Prompt, with a hash for each of its blocks.
        reserve : int
            Tokens behind the prompt whose K/V will be written. With any, the last block of the
            prompt is nobody else's, unless the prompt fills it.
        """
        self._waiting.append((index, request, reserve))

    def end(self, index: int, *, written: int | None = None, hash_ids: Sequence[int] = ()) -> None:
        """Give back what a request has, or take it from those that wait; `PrefixCache.release`."""
        chunk = self._begun.pop(index, None)
        if chunk is None:
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != index)
        else:
            self.cache.release(chunk.lease, written=written, hash_ids=hash_ids)

    def next_batch(self, ready: Iterable[int] = ()) -> Batch | None:
        """Form the next batch; None if there is nothing that can be computed.

        The caller runs a batch before it asks for another, and ends requests between the two.

        Parameters
        ----------
        ready : ints
            Requests behind their prompts whose next token is known: one token each.
        """
        chunks = [_follow(self._begun[index]) for index in ready]
        room = self.token_budget - len(chunks)
        unfinished = next((c for c in reversed(self._begun.values()) if not c.has_next), None)
        while room > 0 and (unfinished or self._waiting):
            if unfinished:
                chunk = _continue(unfinished, room)
            else:
                if len(self._begun) >= self.max_sequences:
                    break
                index, request, reserve = self._waiting[0]
                lease = self._lease(request, reserve)
                if lease is None:  # others hold the pages, until they end
                    break
                self._waiting.popleft()
                chunk = _begin(index, request, lease, room)
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


def _begin(request_index: int, request: Request, lease: Lease, room: int) -> Chunk:
    begin = _first_token(request, lease)
    return Chunk(request_index, request, lease, begin, min(begin + room, request.input_length))


def _continue(chunk: Chunk, room: int) -> Chunk:
    end = min(chunk.end + room, chunk.request.input_length)
    return Chunk(chunk.request_index, chunk.request, chunk.lease, chunk.end, end)


def _follow(chunk: Chunk) -> Chunk:
    return Chunk(chunk.request_index, chunk.request, chunk.lease, chunk.end, chunk.end + 1)


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
