# SPDX-License-Identifier: Apache-2.0
"""Memory for KV pools that the ranks of a host share: a part of each rank, in one address range."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from .. import _core
from ..kv.buffers import BufferShape, Memory
from .exchange import NO_TERMS, RowExchange, ranks_text, term
from .host import HostGroup

LARGE_PAGE = 2 << 20
# Ranges of address space of a buffer; a process may have 65530 in all.
_MOST_RANGES = 4096
# Neither shorter nor longer from here on: what is mapped can be neither cut off nor missing. Linux
# has these numbers since 3.17, Python where its libc has.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ALLOW_SEALING = 0x2
_MEMORY_INFO = Path("/proc/meminfo")
_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Range(NamedTuple):
    """Bytes of a buffer that a rank has in its file."""

    rank: int
    offset: int
    num_bytes: int


def split_buffer(shape: BufferShape, num_ranks: int, offsets: list[int]) -> list[Range]:
    """The ranges of a buffer in turn, the same share of each layer for every rank.

    A range ends at a page of the system, or at a large page where ranges have some of these.
    `offsets` is where each rank's file goes on; it is moved behind the buffer.
    """
    layers = max(1, min(shape.num_layers, _MOST_RANGES // num_ranks))
    pieces = layers * num_ranks
    grain = LARGE_PAGE if shape.num_bytes >= 2 * LARGE_PAGE * pieces else mmap.PAGESIZE
    cuts = [shape.num_bytes * i // pieces // grain * grain for i in range(pieces)]
    cuts.append(-(-shape.num_bytes // grain) * grain)
    offsets[:] = [-(-offset // LARGE_PAGE) * LARGE_PAGE for offset in offsets]
    ranges = []
    for i, (begin, end) in enumerate(pairwise(cuts)):
        if begin < end:
            rank = i % num_ranks
            ranges.append(Range(rank, offsets[rank], end - begin))
            offsets[rank] += end - begin
    return ranges


class SharedMemory(Memory):
    """Memory for KV pools that all ranks of a group share, from `ContextParallel.shared_memory`.

    All ranks make the same pools, in the same order, and have each of them together. Every rank
    gives an equal share of each layer, which is committed when the pool is made and lies on the
    NUMA node where the rank runs then; all ranks see the shares in one range of addresses, so that
    block tables, views and kernels are those of any pool. The memory has no name: the last process
    that maps it takes it along, however it ends, and `/dev/shm` is not used.

    Parameters
    ----------
    host, exchange
        Of the `ContextParallel` that gives it.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import MHATokenToKVPool
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4)
    >>> pool = MHATokenToKVPool(size=64, page_size=4, num_layers=2, num_kv_heads=1, head_dim=16,
    ...                         memory=cp.shared_memory())
    >>> pool.get_key_buffer(1).shape
    torch.Size([17, 4, 1, 16])
    >>> dist.destroy_process_group()
    """

    def __init__(self, host: HostGroup, exchange: RowExchange) -> None:
        self._host = host
        self._exchange = exchange

    def __repr__(self) -> str:
        return f"SharedMemory(rank {self._host.rank} of {self._host.size})"

    def make_buffers(
        self, function: str, shapes: dict[str, BufferShape]
    ) -> dict[str, _core.KVBuffer]:
        """A buffer of zeros for each kind, in memory of all ranks, which all call this."""
        host = self._host
        with self._exchange.agreement("shared_memory", NO_TERMS) as parts:
            parts.shared_memory = term(tuple(shapes.items()))
        offsets = [0] * host.size
        ranges = {kind: split_buffer(s, host.size, offsets) for kind, s in shapes.items()}
        total = sum(r.num_bytes for kind in ranges.values() for r in kind)
        memories: dict[str, _core.PoolMemory] = {}
        failure: Exception | None = None
        with host.without_return():
            own = _File(offsets[host.rank])
            try:
                told = host.meet(f"{function} (memory)", [own.error, own.fd, available_bytes()])
                refusal = _refusal(function, total, offsets, told)
                if refusal is None:
                    try:
                        memories = self._mapped(function, ranges, [fd for _, fd, _ in told])
                    except Exception as error:
                        failure = error
                    done = host.meet(f"{function} (memory)", [int(failure is not None)])
                    failed = [rank for rank, (bad,) in enumerate(done) if bad]
                    if failed:
                        refusal = (
                            f"{function}: {ranks_text(failed)} of {host.size} cannot map the pool"
                        )
            finally:
                own.close()
        if failure is not None:
            raise failure
        if refusal is not None:
            raise MemoryError(refusal)
        buffers = {
            kind: _core.KVBuffer(function, *shape, memories[kind]) for kind, shape in shapes.items()
        }
        for kind, buffer in buffers.items():
            host.remember(buffer, shapes[kind].num_bytes)
        return buffers

    def _mapped(
        self, function: str, ranges: Mapping[str, list[Range]], fds: list[int]
    ) -> dict[str, _core.PoolMemory]:
        """The files of all ranks, range by range; this rank's parts are committed."""
        host = self._host
        files: list[int] = []
        try:
            for pid, fd in zip(host.pids, fds, strict=True):
                files.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            return {
                kind: _core.map_shared_memory(
                    function,
                    [(files[r.rank], r.offset, r.num_bytes, r.rank == host.rank) for r in of_kind],
                )
                for kind, of_kind in ranges.items()
            }
        finally:
            for file in files:
                os.close(file)


class _File:
    """A file in memory, of a size that nobody can change any more; no memory is taken yet."""

    def __init__(self, num_bytes: int) -> None:
        self.fd, self.error = -1, 0
        try:
            self.fd = os.memfd_create("cpattn pool", os.MFD_CLOEXEC | _ALLOW_SEALING)
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
        except OSError as error:
            self.error = error.errno or 1
        except OverflowError:  # of a size beyond 64 bits
            self.error = 27  # EFBIG

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _refusal(function: str, total: int, sizes: list[int], told: list[list[int]]) -> str | None:
    """Why there is no memory for a pool: all ranks find the same."""
    for rank, (error, _, _) in enumerate(told):
        if error:
            return (
                f"{function}: rank {rank} of {len(told)} cannot have {_gib(sizes[rank])} of shared "
                f"memory: {os.strerror(error)}"
            )
    available = min(available for _, _, available in told)
    if total > available:
        return (
            f"{function}: the host has no {_gib(total)} for a pool that {len(told)} ranks share, "
            f"{_gib(available)} are available"
        )
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def available_bytes() -> int:
    """What this process can still take, by the system and by its control groups.

    Beyond a control group's limit the system ends processes, where it could refuse memory.
    """
    available = 2**62
    for line in _lines(_MEMORY_INFO):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = 1024 * int(value.split()[0])
    for line in _lines(_CGROUPS):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, with one hierarchy
            available = min(available, _left_in(path, "", ("memory.max", "memory.current")))
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            available = min(available, _left_in(path, "memory", files))
    return available


def _left_in(path: str, root: str, files: tuple[str, str]) -> int:
    """Bytes until the nearest limit of a control group or one around it."""
    left = 2**62
    top = _CGROUP_ROOT / root
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        limit, used = ("".join(_lines(folder / name)).strip() for name in files)
        if limit.isdigit() and used.isdigit():
            left = min(left, max(0, int(limit) - int(used) + _reclaimable(folder)))
        if folder == top:
            break
    return left


def _reclaimable(folder: Path) -> int:
    """Pages of files, which count as used and are given up for others."""
    names = ("inactive_file", "total_inactive_file")  # version 2; version 1, with groups within
    found = [
        int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] in names
    ]
    return max(found, default=0)


def _lines(path: Path) -> list[str]:
    """Of a file of the system; none where it has no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
