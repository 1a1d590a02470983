# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group that share a host: their detection, meeting place and shared buffers."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import UUID
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ... import _core
from .exchange import RowExchange
from .rails import Hosts, Rails
from .roll_call import HOSTS
from .terms import NO_TERMS, ranks_text, term
from .timeouts import FIRST_MEETING, timeout_of
from .topology import Topology

TRANSPORTS = ("auto", "tcp", "shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_NAME_WORDS = 8  # int64 words of a host's name
_NONCE_AT = _core.host_barrier_page_bytes - 8  # after the bytes of a page that the barrier uses
# Seals fix the size: mapped bytes can neither be cut off nor be missing. Linux has these numbers
# since 3.17; Python has them if its libc does.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ALLOW_SEALING = 0x2
# Reasons against shared memory, as texts; each with an errno or 0.
_PROBLEMS = (
    "",
    "has no files in memory",
    "cannot open the memory of another rank",
    "cannot map the memory of the others, or watch their processes",
    "does not see what the others write",
)


def sealed_file(name: str, num_bytes: int) -> int:
    """Make a file in memory with a sealed size; no memory is committed yet.

    A rank that maps an unsealed file dies at its first access past the end if the file is cut.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | _ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class _Page:
    """File in memory for this rank's page of the barrier, with a number that identifies it."""

    def __init__(self) -> None:
        self.fd, self.error = -1, 0
        self.nonce = secrets.randbits(63)
        try:
            self.fd = sealed_file("cpattn barrier", _core.host_barrier_page_bytes)
            os.pwrite(self.fd, struct.pack("q", self.nonce), _NONCE_AT)
        except (AttributeError, OSError) as error:  # a Python for older systems; limits
            self.error = getattr(error, "errno", None) or 1

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Announcement(NamedTuple):
    """Announcement of a rank to the others, as int64."""

    boot_id: tuple[int, int]
    pid_namespace: int
    pid: int
    fd: int
    nonce: int
    error: int
    transport: int
    host: str

    @classmethod
    def of_this_process(cls, page: _Page, transport: str) -> _Announcement:
        boot_id = struct.unpack("qq", UUID(_BOOT_ID.read_text().strip()).bytes)
        return cls(
            boot_id, _PID_NAMESPACE.stat().st_ino, os.getpid(), page.fd, page.nonce, page.error,
            TRANSPORTS.index(transport), socket.gethostname(),
        )  # fmt: skip

    def values(self) -> list[int]:
        name = self.host.encode()[: 8 * _NAME_WORDS].ljust(8 * _NAME_WORDS, b"\0")
        return [*self.boot_id, *self[1:-1], *struct.unpack(f"{_NAME_WORDS}q", name)]

    @classmethod
    def of_values(cls, values: Sequence[int]) -> _Announcement:
        name = struct.pack(f"{_NAME_WORDS}q", *values[-_NAME_WORDS:]).rstrip(b"\0")
        first, second, namespace, pid, fd, nonce, error, transport = values[:-_NAME_WORDS]
        host = name.decode(errors="replace")
        return cls((first, second), namespace, pid, fd, nonce, error, transport, host)


class HostGroup:
    """Ranks of a group on one host: their meeting place and their shared buffers.

    `rank` and `size` count within this host; `rails.members` are its ranks in the group.
    """

    def __init__(
        self,
        barrier: _core.HostBarrier,
        group: dist.ProcessGroup,
        rails: Rails,
        pids: Sequence[int],
    ) -> None:
        self.rank, self.size = barrier.rank, barrier.size
        self.rails = rails
        self.pids = tuple(pids)
        self._barrier = barrier
        self._timeout = timeout_of(group)
        self._buffers: list[tuple[int, int, ReferenceType[_core.KVBuffer]]] = []
        self._made = 0

    def meet(
        self, call: str, terms: Sequence[int] = (), give_up: Callable[[], bool] | None = None
    ) -> list[list[int]]:
        """Wait for the ranks of this host, within the group's timeout; return the terms of each."""
        return self._barrier.meet(call, terms, self._timeout, give_up)

    def loss(self) -> tuple[list[int], str, bool]:
        """Return the ranks that missed a meeting, why, and whether only time ran out."""
        return self._barrier.loss()

    def ended(self) -> list[int]:
        """Return the ranks of this host whose processes have ended."""
        return self._barrier.ended()

    def leave(self, because_of: int = -1) -> None:
        """Tell the others not to wait for this rank at the next meeting, but to name another."""
        self._barrier.leave(because_of)

    def remember(self, buffer: _core.KVBuffer, num_bytes: int) -> None:
        """Register a buffer that all ranks have made, in the same order, as shared."""
        self._buffers = [entry for entry in self._buffers if entry[2]() is not None]
        self._buffers.append((self._made, num_bytes, ref(buffer)))
        self._made += 1

    def place_of(self, cache: torch.Tensor) -> tuple[int, int] | None:
        """Return the shared buffer that holds a tensor, and the byte there; equal on every rank."""
        addr = cache.data_ptr()
        for number, num_bytes, buffer in self._buffers:
            alive = buffer()
            if alive is not None and alive.addr <= addr < alive.addr + num_bytes:
                return number, addr - alive.addr
        return None

    def digest_of(self, call: str, caches: Mapping[str, torch.Tensor]) -> int:
        """Digest the properties of shared caches that must be equal on all ranks; 0 for none."""
        places = {name: self.place_of(cache) for name, cache in caches.items()}
        found = {name: place for name, place in places.items() if place is not None}
        if not found:
            return 0
        if len(found) < len(caches):
            raise ValueError(
                f"ContextParallel.{call}: {' and '.join(caches)} must be in shared memory both or "
                f"neither, got only {', '.join(found)} there"
            )
        return term(tuple((*place, *caches[name].shape) for name, place in found.items()))


class Connection(NamedTuple):
    """Facts that the ranks of a group know about each other."""

    topology: Topology
    host: HostGroup | None  # None if they share no memory


# By group, for all its objects but those with transport "tcp": a rank that makes another object
# asks no rank again.
CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, Connection] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup, exchange: RowExchange, transport: str) -> Connection:
    """Find the ranks that share a host and, unless "tcp", memory. All ranks call it together.

    Ranks share memory on every host or on none.

    Errors are those of an exchange. If memory cannot be shared, the reason goes with "tcp".
    """
    page = _Page()
    try:
        with exchange.agreement("topology", NO_TERMS):  # a system may hide the announced facts
            own = _Announcement.of_this_process(page, transport).values()
        told = exchange.all_values("topology", own)
        ranks = [_Announcement.of_values(values) for values in told]
        odd = [rank for rank, one in enumerate(ranks) if one.transport != ranks[0].transport]
        if odd:
            raise RuntimeError(
                f"ContextParallel.topology: transport of {ranks_text(odd)} differs from rank 0"
            )
        boots = dict.fromkeys(one.boot_id for one in ranks)
        hosts = tuple(
            tuple(rank for rank, one in enumerate(ranks) if one.boot_id == boot) for boot in boots
        )
        rails = Rails(hosts, exchange.rank)
        barrier, reason = None, _obstacle(ranks, hosts, transport)
        if reason is None:
            # Ranks of other hosts wait meanwhile; they must not blame the ranks that meet.
            patience = min(FIRST_MEETING, timeout_of(group) / 2) if rails.others else FIRST_MEETING
            barrier, reason = _barrier_of(exchange, ranks, rails.members, patience)
    finally:
        page.close()
    if barrier is None:
        chosen = "tcp"
    elif len(hosts) == 1:
        chosen, reason = "shm", "all ranks share the memory of one host"
    else:
        chosen, reason = "shm+tcp", f"ranks are on {len(hosts)} hosts, those of each share memory"
    names = tuple(ranks[members[0]].host for members in hosts)
    topology = Topology(chosen, names, hosts, reason or "")
    if barrier is None:
        connection = Connection(topology, None)
    else:
        host = HostGroup(barrier, group, rails, [ranks[member].pid for member in rails.members])
        connection = Connection(topology, host)
        HOSTS[group] = host
    if transport != "tcp":
        CONNECTIONS[group] = connection
    return connection


def _obstacle(ranks: Sequence[_Announcement], hosts: Hosts, transport: str) -> str | None:
    """Return the reason why memory cannot be shared, if it is known before trying."""
    if transport == "tcp":
        return "transport='tcp' was given"
    if 1 < len(hosts) == len(ranks):
        return f"ranks are on {len(hosts)} hosts"
    for first, *others in hosts:
        namespace = ranks[first].pid_namespace
        apart = [rank for rank in others if ranks[rank].pid_namespace != namespace]
        if apart:
            return f"{ranks_text(apart)} is in another PID namespace than rank {first}"
        if len({ranks[rank].pid for rank in (first, *others)}) <= len(others):
            return "ranks are threads of one process"
    return _first_problem([[one.error and 1, one.error] for one in ranks])


def _barrier_of(
    exchange: RowExchange, ranks: Sequence[_Announcement], members: Sequence[int], patience: float
) -> tuple[_core.HostBarrier | None, str | None]:
    """Return a tested barrier of this host, or the reason why some host has none."""
    barrier, problem, error = None, 0, 0
    here = [ranks[member] for member in members]
    fds: list[int] = []
    try:
        problem = 2
        for one in here:
            fds.append(_opened(one))
        problem = 3
        barrier = _core.HostBarrier(
            members.index(exchange.rank), fds, [one.pid for one in here], members, exchange.size
        )
        problem = 0
    except OSError as failed:
        error = failed.errno or 0
    except (RuntimeError, ValueError):
        pass
    finally:
        for fd in fds:
            os.close(fd)
    reason = _first_problem(exchange.all_values("topology", [problem, error]))
    if reason is not None or barrier is None:
        return None, reason
    try:
        nonces = barrier.meet("ContextParallel.topology", [ranks[exchange.rank].nonce], patience)
        problem = 0 if nonces == [[one.nonce] for one in here] else 4
    except RuntimeError:
        problem = 4
    reason = _first_problem(exchange.all_values("topology", [problem, 0]))
    return (barrier, None) if reason is None else (None, reason)


def _opened(one: _Announcement) -> int:
    """Open the page of a rank; OSError if another file is there."""
    path = f"/proc/{one.pid}/fd/{one.fd}"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(fd, 8, _NONCE_AT) != struct.pack("q", one.nonce):
        os.close(fd)
        raise FileNotFoundError(2, "is another file", path)
    return fd


def _first_problem(problems: Sequence[Sequence[int]]) -> str | None:
    for rank, (problem, error) in enumerate(problems):
        if problem:
            why = f": {os.strerror(error)}" if error else ""
            return f"rank {rank} {_PROBLEMS[problem]}{why}"
    return None
