# SPDX-License-Identifier: Apache-2.0
"""Messages of ranks when one of them cannot go on: missing ranks, and reasons.

A rank that waits for rows knows only the rank it waits for, which may wait for another rank. A rank
that gives up therefore tells all others which rank it missed, and then closes its connections: all
others give up at once, too, and name the same rank.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from .rails import Rails
from .timeouts import BEHIND_TIMEOUT, LAST_WORDS, LAST_WORDS_OF_THE_WAITING, timeout_of
from .waiting import Works

_WORD_BYTES = 512
_MOST_NAMES = 16
_HEADER = struct.Struct(f"<Bi{_MOST_NAMES}i")
_WORDS_TAG, _CLOSING_TAG = 0x63706101, 0x63706102  # differ from tags of other messages
_AT_ONCE = timedelta(milliseconds=1)


class Words(NamedTuple):
    """Last message of a rank: the ranks it missed, and why; no rank for its own error."""

    missed: tuple[int, ...]
    reason: str
    timed_out: bool = False  # a missed rank may have waited itself

    def encoded(self) -> bytes:
        """Encode at a fixed length, with an end that is not zero and arrives last."""
        missed = self.missed[:_MOST_NAMES]
        names = [*missed, *[-1] * (_MOST_NAMES - len(missed))]
        header = _HEADER.pack(self.timed_out, len(missed), *names)
        text = self.reason.encode()[: _WORD_BYTES - _HEADER.size - 1]
        return (header + text).ljust(_WORD_BYTES - 1, b"\0") + b"\1"

    @classmethod
    def decoded(cls, data: bytes) -> Words:
        timed_out, count, *names = _HEADER.unpack_from(data)
        text = data[_HEADER.size : -1].rstrip(b"\0").decode(errors="replace")
        return cls(tuple(names[:count]), text, bool(timed_out))


class Host(Protocol):
    """Meeting of the ranks of a group that share a host."""

    rails: Rails

    def meet(
        self, call: str, terms: Sequence[int] = (), give_up: Callable[[], bool] | None = None
    ) -> list[list[int]]: ...
    def loss(self) -> tuple[list[int], str, bool]: ...
    def ended(self) -> list[int]: ...
    def leave(self, because_of: int = -1) -> None: ...


# Host of each group whose ranks share memory, on one host or on each host.
HOSTS: WeakKeyDictionary[dist.ProcessGroup, Host] = WeakKeyDictionary()
_ROLL_CALLS: WeakKeyDictionary[dist.ProcessGroup, RollCall] = WeakKeyDictionary()


def roll_call_of(group: dist.ProcessGroup, peers: Mapping[int, int]) -> RollCall:
    """Return the roll call of a group; `peers` maps its other ranks to ranks of the world."""
    if group not in _ROLL_CALLS:
        _ROLL_CALLS[group] = RollCall(group, peers)
    return _ROLL_CALLS[group]


class RollCall:
    """Last messages of all ranks of a group, and whether this rank has sent its own.

    Receives are posted at the start, so a message arrives as soon as it is sent, before its
    connection ends. This needs gloo, which delivers in order. Over other backends no rank sends a
    message, and each rank finds out by itself.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Mapping[int, int]) -> None:
        self.over = False
        self.agreed = False  # whether all ranks compare the same terms
        self._under_way: list[Works] = []
        self._peers = dict(peers)
        self.timeout = timeout_of(group)
        self._by_gloo = _is_gloo(group)
        # If gloo ends a wait, it closes all connections silently: our waits must end before.
        self.longest_wait = self.timeout + BEHIND_TIMEOUT if self._by_gloo else None
        size = 1 + max(peers, default=0)
        self._words = torch.zeros(size, _WORD_BYTES, dtype=torch.uint8, device="cpu")
        self._view = self._words.numpy()
        self._works: list[Any] = []
        if self._by_gloo:
            for rank, world_rank in self._peers.items():
                with contextlib.suppress(RuntimeError):  # a dead rank shows when it is used
                    work = dist.irecv(self._words[rank], world_rank, group, _WORDS_TAG)
                    self._works.append(work)

    def keep(self, works: Works) -> None:
        """Keep posted works until they finish, even if their owner drops them.

        With gloo, rows that no rank receives block all rows after them.
        """
        self._under_way.append(works)

    def release(self, works: Works) -> None:
        """Forget works that have finished."""
        self._under_way = [other for other in self._under_way if other is not works]

    def has_only(self, works: Works) -> bool:
        """Tell whether no other work is under way over gloo, which moves bytes by itself."""
        return self._by_gloo and len(self._under_way) == 1 and self._under_way[0] is works

    def has_heard(self) -> bool:
        """Tell whether another rank has said something."""
        return bool(self._view[:, -1].any())

    def heard(self) -> dict[int, Words]:
        """Return the messages of the other ranks."""
        said: list[int] = np.flatnonzero(self._view[:, -1]).tolist()
        return {rank: Words.decoded(self._view[rank].tobytes()) for rank in said}

    def leave(self, group: dist.ProcessGroup, words: Words) -> None:
        """Tell the others why this rank leaves; once. `hang_up` follows if it waits for a rank."""
        self.over = True
        if (host := HOSTS.get(group)) is not None:
            host.leave(words.missed[0] if words.missed else -1)
        if not self._by_gloo:
            return
        said = torch.frombuffer(bytearray(words.encoded()), dtype=torch.uint8)
        self._works += list(self._posted(dist.isend, said, group, _WORDS_TAG))
        patience = LAST_WORDS_OF_THE_WAITING if words.timed_out else LAST_WORDS
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if words.timed_out and set(words.missed) <= set(self.heard()):
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
            time.sleep(0.005)

    def hang_up(self, group: dist.ProcessGroup) -> None:
        """Close all connections of the group, as gloo does when a wait takes too long."""
        if self._by_gloo:
            for work in self._posted(dist.irecv, torch.zeros(1, device="cpu"), group, _CLOSING_TAG):
                with contextlib.suppress(RuntimeError):
                    work.wait(_AT_ONCE)

    def named(self, rank: int, failures: Mapping[int, str]) -> dict[int, str]:
        """Return the ranks to blame, and why: those that failed peers have missed, if any."""
        heard = self.heard()
        named: dict[int, str] = {}
        missing_us: dict[int, str] = {}
        pending, seen = list(failures.items()), set[int]()
        while pending:
            lost, reason = pending.pop(0)
            if lost in seen:
                continue
            seen.add(lost)
            words = heard.get(lost)
            if words is None:
                named[lost] = reason
            elif not words.missed:
                named[lost] = f"it has left by an error: {words.reason}"
            elif rank in words.missed:
                missing_us[lost] = f"it has left as it missed this rank: {words.reason}"
            else:
                pending += [(one, f"rank {lost} says: {words.reason}") for one in words.missed]
        return named or missing_us or dict(failures)

    def _posted(
        self, post: Callable[..., Any], data: torch.Tensor, group: dist.ProcessGroup, tag: int
    ) -> Iterator[Any]:
        for world_rank in self._peers.values():
            with contextlib.suppress(RuntimeError, ValueError):  # the group is gone or destroyed
                yield post(data, world_rank, group, tag)


@dataclass
class Watch:
    """Check, while rows are awaited, which ranks have left or ended, and since when."""

    group: dist.ProcessGroup
    roll_call: RollCall
    begin: float
    ended_since: float | None = None

    def losses(self, awaited: int) -> tuple[dict[int, str], bool]:
        """Return the ranks not to wait for, why, and whether only time ran out."""
        now = time.monotonic()
        heard = self.roll_call.heard()
        if heard:
            failures = {rank: words.reason for rank, words in heard.items()}
            timed_out = any(words.timed_out for words in heard.values())
            if timed_out:
                failures.setdefault(awaited, "no rows came")
            return failures, timed_out
        ended = self._ended(awaited)
        if not ended:
            self.ended_since = None
        elif self.ended_since is None:
            self.ended_since = now
        elif now - self.ended_since > LAST_WORDS_OF_THE_WAITING:  # its rows would be here
            return dict.fromkeys(ended, "its process has ended"), False
        if now - self.begin < self.roll_call.timeout:
            return {}, False
        return {awaited: f"timed out after {self.roll_call.timeout:g} s"}, True

    def _ended(self, awaited: int) -> list[int]:
        """Return the ranks of this host whose processes have ended, if some rank misses them.

        A rank that this one does not await may have finished. Ranks of its own host notice that
        it has ended, ranks of other hosts do not: with several hosts, every ended rank counts.
        """
        host = HOSTS.get(self.group)
        ended = [] if host is None else host.ended()
        return ended if awaited in ended or (host is not None and host.rails.others) else []


def _is_gloo(group: dist.ProcessGroup) -> bool:
    with contextlib.suppress(RuntimeError):
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    return False
