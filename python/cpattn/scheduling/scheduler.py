# SPDX-License-Identifier: Apache-2.0
"""Prefill batches: several prompts under a token budget, each behind its own cached prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._limits import check_integer, check_kind
from .prefix_cache import Lease, PrefixCache
from .request import Request, checked_requests


@dataclass(frozen=True)
class Chunk:
    """Tokens begin ... end - 1 of one prompt, computed in one batch; begin of them are prefix.

    Attributes
    ----------
    request_index : int
        Index of `request` among all that were given.
    request : Request
    lease : Lease
        The pages of the whole prompt.
    begin, end : int
        Positions within the prompt.

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
    check_integer("prefill_batches", "token_budget", token_budget)
    check_integer("prefill_batches", "max_sequences", max_sequences)
    check_kind("prefill_batches", "cache", cache, PrefixCache)
    requests = checked_requests("prefill_batches", requests)
    for i, request in enumerate(requests):
        if cache.pages_needed(request.input_length) > cache.num_pages:
            raise ValueError(
                f"prefill_batches: request {i} has {request.input_length} tokens, the pool "
                f"{cache.num_pages * cache.page_size}"
            )
    waiting = deque(enumerate(requests))
    unfinished: Chunk | None = None
    index = 0
    while waiting or unfinished:
        chunks: list[Chunk] = []
        room = token_budget
        while room and len(chunks) < max_sequences and (unfinished or waiting):
            if unfinished:
                chunk = _continue(unfinished, room)
            else:
                lease = cache.acquire(waiting[0][1].hash_ids, waiting[0][1].input_length)
                if lease is None:  # this batch holds the pages; after it they are released
                    break
                chunk = _begin(*waiting.popleft(), lease, room)
            chunks.append(chunk)
            room -= chunk.num_tokens
            unfinished = None if chunk.is_last else chunk
        yield _make_batch(index, chunks, cache.page_size)
        index += 1
        for chunk in chunks:
            if chunk.is_last:
                cache.release(chunk.lease)


def _first_token(request: Request, lease: Lease) -> int:
    return min(lease.cached_tokens, request.input_length - 1)


def _begin(request_index: int, request: Request, lease: Lease, room: int) -> Chunk:
    begin = _first_token(request, lease)
    return Chunk(request_index, request, lease, begin, min(begin + room, request.input_length))


def _continue(chunk: Chunk, room: int) -> Chunk:
    end = min(chunk.end + room, chunk.request.input_length)
    return Chunk(chunk.request_index, chunk.request, chunk.lease, chunk.end, end)


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
