# SPDX-License-Identifier: Apache-2.0
"""Memory for KV pools that the ranks of a host share: one address range, a part from each rank."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ... import _core
from ...kv.buffers import BufferShape, Memory
from .exchange import RowExchange
from .host import HostGroup, sealed_file
from .rails import Hosts
from .terms import NO_TERMS, ranks_text, term

LARGE_PAGE = 2 << 20
# Most ranges of address space per buffer; Linux allows a process 65530 in all.
_MOST_RANGES = 4096
_SCRATCH_ROW = 4096  # bytes
_SCRATCH_CALL = "ContextParallel.attend"
_MEMORY_INFO = Path("/proc/meminfo")
_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Range(NamedTuple):
    """Range of a buffer's bytes that lies in the memory file of one rank."""

    rank: int
    offset: int
    num_bytes: int


def split_buffer(shape: BufferShape, num_ranks: int, offsets: list[int]) -> list[Range]:
    """Split a buffer into ranges that ranks provide in turn; all give equal shares of each layer.

    Ranges are as short as large pages and the limit on their number allow. Every rank reads all
    keys, and the keys of few sequences lie side by side; short ranges spread each sequence over all
    NUMA nodes. `offsets` holds the end of each rank's file; the call moves it behind the buffer.
    """
    shares = shape.num_layers * num_ranks
    large = shape.num_bytes >= 2 * LARGE_PAGE * shares
    grain = LARGE_PAGE if large else mmap.PAGESIZE
    most = min(_MOST_RANGES, shape.num_bytes // LARGE_PAGE if large else shares)
    num_bytes, step = (-(-shape.num_bytes // (n * grain)) * grain for n in (1, most))
    offsets[:] = [-(-offset // LARGE_PAGE) * LARGE_PAGE for offset in offsets]
    ranges = []
    for i, begin in enumerate(range(0, num_bytes, step)):
        rank = i % num_ranks
        ranges.append(Range(rank, offsets[rank], min(step, num_bytes - begin)))
        offsets[rank] += ranges[-1].num_bytes
    return ranges


class SharedMemory(Memory):
    """Memory for KV pools that the ranks of a host share, from `ContextParallel.shared_memory`.

    All ranks of the group make the same pools, in the same order. Each host has one copy of a pool,
    which its ranks share. Every rank provides an equal share of each layer. Making the pool commits
    the share on the NUMA node where the rank then runs. Shares are ranges of at least 2 MiB that
    take turns over the ranks, so all nodes serve reads at once for any sequences. All ranks see the
    pool in one address range: block tables, views and kernels are as for any pool. The memory has
    no name and does not use `/dev/shm`: it is freed when the last process that maps it ends, in any
    way.

    Parameters
    ----------
    host, exchange
        Objects of the `ContextParallel` that makes this one.

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
        members = self._host.rails.members
        return f"SharedMemory(rank {members[self._host.rank]} of {ranks_text(members)})"

    def _make_buffers(
        self, function: str, shapes: dict[str, BufferShape]
    ) -> dict[str, _core.KVBuffer]:
        """Make a buffer of zeros for each kind in this host's shared memory; all ranks call it."""
        host, exchange = self._host, self._exchange
        hosts, members = host.rails.hosts, host.rails.members
        with exchange.agreement("shared_memory", NO_TERMS) as parts:
            parts.shared_memory = term(tuple(shapes.items()))
        ranges: dict[str, list[Range]] = {}
        totals = []  # of each host
        sizes = [0] * exchange.size  # of each rank
        for ranks in hosts:
            offsets = [0] * len(ranks)
            of_kinds = {kind: split_buffer(s, len(ranks), offsets) for kind, s in shapes.items()}
            for rank, num_bytes in zip(ranks, offsets, strict=True):
                sizes[rank] = num_bytes
            totals.append(sum(r.num_bytes for kind in of_kinds.values() for r in kind))
            if ranks == members:
                ranges = of_kinds
        memories: dict[str, _core.PoolMemory] = {}
        failure: Exception | None = None
        with exchange.without_return():
            own = _File(sizes[exchange.rank])
            try:
                about = [own.error, own.fd, own.num_bytes(), available_bytes()]
                told = exchange.told("shared_memory", about)
                refusal = _refusal(function, totals, sizes, told, hosts)
                if refusal is None:
                    fds = [told[rank][1] for rank in members]
                    try:
                        memories = self._mapped(function, ranges, sizes, fds)
                    except Exception as error:
                        failure = error
                    done = exchange.told("shared_memory", [int(failure is not None)])
                    failed = [rank for rank, (bad,) in enumerate(done) if bad]
                    if failed:
                        refusal = (
                            f"{function}: {ranks_text(failed)} of {exchange.size} cannot map the "
                            "pool"
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
        self, function: str, ranges: Mapping[str, list[Range]], sizes: list[int], fds: list[int]
    ) -> dict[str, _core.PoolMemory]:
        """Map the files of this host's ranks range by range, and commit the parts of this rank."""
        host = self._host
        files: list[int] = []
        try:
            for rank, pid, fd in zip(host.rails.members, host.pids, fds, strict=True):
                files.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
                if (num_bytes := os.fstat(files[-1]).st_size) != sizes[rank]:
                    raise MemoryError(_short_part(function, rank, sizes, num_bytes))
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


def shared_scratch(exchange: RowExchange, host: HostGroup, num_bytes: int) -> list[torch.Tensor]:
    """Return two buffers of at least `num_bytes` each, shared by the ranks of a host.

    All ranks of the group call this with the same numbers. The next call returns the same buffers
    with their contents. All ranks raise MemoryError if a host lacks the memory.
    """
    if not exchange.scratch or exchange.scratch[0].numel() < num_bytes:
        exchange.scratch.clear()  # free the old buffers first
        num_rows = max(1, -(-num_bytes // _SCRATCH_ROW))  # a row even without keys
        shape = BufferShape(2, num_rows, _SCRATCH_ROW, "int8")
        buffers = SharedMemory(host, exchange)._make_buffers(_SCRATCH_CALL, {"scratch": shape})
        whole = torch.from_numpy(buffers["scratch"].bytes).view(-1)
        exchange.scratch.extend(whole[: shape.num_bytes].view(2, -1))
    return exchange.scratch


class _File:
    """File of memory that this rank provides, or the error number if there is none."""

    def __init__(self, num_bytes: int) -> None:
        self.fd, self.error = -1, 0
        try:
            self.fd = sealed_file("cpattn pool", num_bytes)
        except OSError as error:
            self.error = error.errno or 1
        except OverflowError:  # size beyond 64 bits
            self.error = 27  # EFBIG

    def num_bytes(self) -> int:
        return os.fstat(self.fd).st_size if self.fd >= 0 else 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _refusal(
    function: str, totals: list[int], sizes: list[int], told: list[list[int]], hosts: Hosts
) -> str | None:
    """Return why there is no memory for a pool or scratch; all ranks get the same text."""
    what = "scratch" if function == _SCRATCH_CALL else "a pool"
    for rank, (error, _, num_bytes, _) in enumerate(told):
        if error:
            return (
                f"{function}: rank {rank} of {len(told)} cannot have {_gib(sizes[rank])} of shared "
                f"memory: {os.strerror(error)}"
            )
        if num_bytes != sizes[rank]:
            return _short_part(function, rank, sizes, num_bytes)
    for total, ranks in zip(totals, hosts, strict=True):
        available = min(told[rank][3] for rank in ranks)
        if total > available:
            which = "the host" if len(hosts) == 1 else f"the host of {ranks_text(ranks)}"
            return (
                f"{function}: {which} has no {_gib(total)} for {what} that {len(ranks)} ranks "
                f"share, {_gib(available)} are available"
            )
    return None


def _short_part(function: str, rank: int, sizes: list[int], num_bytes: int) -> str:
    return (
        f"{function}: rank {rank} of {len(sizes)} must give {sizes[rank]} bytes of shared memory, "
        f"got a file of {num_bytes}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def available_bytes() -> int:
    """Return the bytes that this process can still take under the limits of system and cgroups.

    The system kills processes beyond a cgroup's limit instead of refusing memory.
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
    """Return the bytes left below the tightest limit of a cgroup and its ancestors."""
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
    """Bytes of file pages, which count as used but are given up on demand."""
    names = ("inactive_file", "total_inactive_file")  # version 2; version 1 with its subgroups
    found = [
        int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] in names
    ]
    return max(found, default=0)


def _lines(path: Path) -> list[str]:
    """Return the lines of a system file, or none if there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
