# SPDX-License-Identifier: Apache-2.0
"""Rows between all ranks of a group, sent only once all ranks expect the same."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import _core

PLAN_TERMS = ("lengths", "strategy and page_size", "block_tables", "slots", "mask", "placement")
NO_TERMS = (0,) * len(PLAN_TERMS)  # of calls without a plan, or with what is none
_CALLS = ("write_kv", "gather", "attend", "decode", "topology", "shared_memory")
# What the ranks compare before an exchange, int64 each. The first difference is reported.
TERMS = (
    "refused", "sequence", "call", *PLAN_TERMS, "rows", "exchange", "options", "shared memory"
)  # fmt: skip
_ROW_ALIGNMENT = 16  # bytes, so that each part of a row can be viewed as its dtype
_EMPTY = torch.empty(0, dtype=torch.uint8)
# For groups whose ranks share memory: of a call and the terms of this rank, those of all ranks.
MEETINGS: WeakKeyDictionary[dist.ProcessGroup, Callable[[str, Sequence[int]], list[list[int]]]] = (
    WeakKeyDictionary()
)


def digest(*values: Any) -> int:
    """64 bits for the bytes of values."""
    hashed = blake2b(digest_size=8)
    for value in values:
        hashed.update(value)
    return int.from_bytes(hashed.digest(), "little", signed=True)


@lru_cache(1024)
def term(value: Hashable) -> int:
    """64 bits for a value of numbers, names and dtypes."""
    return digest(repr(value).encode())


class Parts(list[torch.Tensor]):
    """What a rank brings to an exchange: its rows, and where in shared memory they belong."""

    shared_memory = 0  # a digest; 0 for none


class RowExchange:
    """Every rank of a group sends its rows to every other one.

    Rows travel point to point and land where they are read, so uneven and empty shares need no
    padding, and as bytes, so every dtype does. Over gloo, 16 MiB per rank take a third of the time
    of an all-gather. The receive buffer is kept for the next call.

    What the ranks agree on before goes through shared memory, once they have some for the group
    (`MEETINGS`), unless `through_memory` says otherwise.
    """

    def __init__(self, group: dist.ProcessGroup, *, through_memory: bool = True) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._group = group
        self._peers = {
            rank: dist.get_global_rank(group, rank)
            for rank in range(self.size)
            if rank != self.rank
        }
        self._through_memory = through_memory
        self._sequence = 0
        self._buffer = _EMPTY

    @contextlib.contextmanager
    def agreement(
        self, call: str, plan_terms: Sequence[int], options: dict[str, int] | None = None
    ) -> Iterator[Parts]:
        """Run this rank's checks, which add the parts of its rows, then compare with all ranks.

        The checks may also put digests of the terms "exchange" and "options" into `options`. A rank
        whose checks fail says so to the others, which would wait for its rows. On a difference
        every rank raises the same RuntimeError, and the group stays usable.
        """
        parts = Parts()
        self._sequence += 1
        try:
            yield parts
        except Exception:
            with contextlib.suppress(RuntimeError):  # the failed check is the better error
                self._all_terms(call, [1] + [0] * (len(TERMS) - 1))
            raise
        rows = term(tuple((part.dtype, part.shape[1]) for part in parts))
        more = [(options or {}).get(name, 0) for name in ("exchange", "options")]
        terms = [0, self._sequence, _CALLS.index(call), *plan_terms, rows, *more]
        terms.append(parts.shared_memory)
        of_ranks = self._all_terms(call, terms)
        if of_ranks.count(terms) < self.size:
            _refuse(call, list(zip(*of_ranks, strict=True)))

    def all_rows(
        self, call: str, rows_per_rank: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """For each part [rows_per_rank[rank], width]: the rows of all ranks, in rank order.

        The results live in the receive buffer, until the next call.
        """
        num_rows = sum(rows_per_rank)
        total = num_rows * _row_bytes(parts)
        storage, self._buffer = self._buffer, _EMPTY  # given up if rows might still arrive in it
        if storage.numel() < total:
            storage = torch.empty(total, dtype=torch.uint8)
        buffer = storage[:total].view(num_rows, _row_bytes(parts))
        columns = _columns(buffer, parts)
        begin = sum(rows_per_rank[: self.rank])
        for column, part in zip(columns, parts, strict=True):
            column[begin : begin + len(part)] = part
        with _core.TraceSpan(_core.TraceScope.gather):
            self._exchange(call, buffer, rows_per_rank)
        self._buffer = storage
        return columns

    def routed_rows(
        self,
        call: str,
        parts: Sequence[torch.Tensor],
        rows_for: Sequence[torch.Tensor],
        rows_from: Sequence[int],
    ) -> list[torch.Tensor]:
        """Send each rank the rows of every part that ``rows_for[rank]`` lists, and no others.

        For each part [sum(rows_from), width]: the rows of all ranks, ``rows_from[rank]`` of each,
        in rank order.
        """
        received = torch.empty(sum(rows_from), _row_bytes(parts), dtype=torch.uint8)
        blocks = received.split(list(rows_from))
        sends = {}
        for rank, rows in enumerate(rows_for):
            own = rank == self.rank
            block = blocks[rank] if own else received.new_empty(len(rows), received.shape[1])
            for column, part in zip(_columns(block, parts), parts, strict=True):
                column.copy_(part.index_select(0, rows))
            if not own:
                sends[rank] = block
        self.blocks(call, sends, {rank: blocks[rank] for rank in self._peers})
        return _columns(received, parts)

    def blocks(
        self, call: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Send contiguous tensors to ranks, and receive into others; empty ones do not travel.

        When a peer fails, the others are served all the same: a rank that gave up early would be
        missing to them, and they would name it.
        """
        self.finish(self.post(call, sends, receives))

    def post(
        self, call: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Posted:
        """Begin what `blocks` does; `finish` waits for it."""
        posted = Posted(call)
        posts: list[tuple[Any, int, torch.Tensor]] = []
        posts += [(dist.irecv, rank, block) for rank, block in receives.items()]
        posts += [(dist.isend, rank, block) for rank, block in sends.items()]
        for post, rank, block in posts:
            if block.numel():
                raw = block.view(-1).view(torch.uint8)
                with _noting(posted.failures, rank):
                    posted.works.append((rank, post(raw, self._peers[rank], self._group)))
        return posted

    def finish(self, posted: Posted) -> None:
        """Wait for all of it; RuntimeError, which names the ranks that did not answer."""
        _wait(posted.works, posted.failures)
        if posted.failures:
            error = next(iter(posted.failures.values()))
            raise RuntimeError(
                f"ContextParallel.{posted.call}: {ranks_text(sorted(posted.failures))} of "
                f"{self.size} did not answer: {error}"
            ) from error

    def _all_terms(self, call: str, terms: Sequence[int]) -> list[list[int]]:
        """The terms of all ranks: one list of each."""
        meet = MEETINGS.get(self._group) if self._through_memory else None
        if meet is None:
            return self.all_values(f"{call} (agreement)", terms).tolist()
        return meet(f"ContextParallel.{call} (agreement)", terms)

    def all_values(self, call: str, values: Sequence[int]) -> torch.Tensor:
        """The values of all ranks, int64 [size, len(values)]; all give the same number."""
        rows = torch.zeros(self.size, len(values), dtype=torch.int64)
        rows[self.rank] = torch.tensor(values)
        self._exchange(call, rows, [1] * self.size)
        return rows

    def _exchange(self, call: str, buffer: torch.Tensor, rows_per_rank: Sequence[int]) -> None:
        """Send this rank's rows of buffer to every peer and receive theirs, all in place."""
        blocks = buffer.split(list(rows_per_rank))
        self.blocks(
            call,
            dict.fromkeys(self._peers, blocks[self.rank]),
            {rank: blocks[rank] for rank in self._peers},
        )


@dataclass
class Posted:
    """Tensors on their way, which must stay as they are until `RowExchange.finish`."""

    call: str
    works: list[tuple[int, Any]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


def _strides(parts: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each part in a row."""
    num_bytes = [part.shape[1] * part.element_size() for part in parts]
    return [-(-n // _ROW_ALIGNMENT) * _ROW_ALIGNMENT for n in num_bytes]


def _row_bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(_strides(parts))


def _columns(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each part's columns of rows of bytes, as its dtype."""
    return [
        column[:, : part.shape[1] * part.element_size()].view(part.dtype)
        for column, part in zip(buffer.split(_strides(parts), 1), parts, strict=True)
    ]


def _wait(pending: Sequence[tuple[int, Any]], failures: dict[int, Exception]) -> None:
    """Wait for all pending works, in a thread: Ctrl-C ends a join, but no wait of a backend.

    A rank that has failed is not waited for again. One that dies while its rows arrive costs gloo
    the whole timeout, which would pass once more for the rows that go there.
    """

    def wait() -> None:
        for rank, work in pending:
            if rank not in failures:
                with _noting(failures, rank):
                    work.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join()


@contextlib.contextmanager
def _noting(failures: dict[int, Exception], rank: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.setdefault(rank, error)


def _refuse(call: str, terms: Sequence[tuple[int, ...]]) -> None:
    """Raise the first difference between ranks: terms[i] are the TERMS[i] of each."""
    refused = [rank for rank, value in enumerate(terms[0]) if value]
    if refused:
        reason = f"{ranks_text(refused)} refused its arguments"
        raise RuntimeError(f"ContextParallel.{call}: {reason}; nothing was sent")
    for name, values in zip(TERMS, terms, strict=True):
        usual = max(values, key=values.count)  # of equally frequent ones the lowest rank's
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            reason = f"{name} of {ranks_text(odd)} differs from rank {values.index(usual)}"
            if name == "call":
                reason += f" ({', '.join(_CALLS[value] for value in values)} by rank)"
            raise RuntimeError(f"ContextParallel.{call}: {reason}; nothing was sent")


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
