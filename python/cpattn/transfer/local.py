# SPDX-License-Identifier: Apache-2.0
"""Engine within one process, for tests and for stages that share a process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from .. import _core
from .._arguments import at_least
from .registration import forget

_OUTSIDE = -1  # Mooncake's code for memory that is not registered, and for unknown sessions

_numbers = itertools.count(1)
_changed = threading.Condition()  # guards all variables below, and the fields of all engines
_engines: dict[str, LocalEngine] = {}


class LocalEngine:
    """Engine that copies between memory of this process; its engines are each other's peers.

    Codes are those of Mooncake, but a write is refused as a whole unless all of it is allowed. Safe
    to use from several threads; the copy runs on ``num_threads`` threads without the GIL, and
    Ctrl-C ends it in the middle.

    Memory of pools stays alive while it is registered. The caller must keep any other memory until
    `unregister` or `close` has returned; `cpattn.transfer.register` does so for tensors.

    Parameters
    ----------
    num_threads : int, optional
        Threads of a copy. Default: that of the library.
    max_blocks : int
        Most blocks per write of ``TransferPlan.execute``.

    Examples
    --------
    >>> import numpy as np
    >>> from cpattn.transfer import LocalEngine
    >>> src, dst = np.arange(8), np.zeros(8, int)
    >>> with LocalEngine() as sender, LocalEngine() as receiver:
    ...     sender.register([src.ctypes.data], [src.nbytes])
    ...     receiver.register([dst.ctypes.data], [dst.nbytes])
    ...     sender.write(receiver.session_id, [src.ctypes.data], [dst.ctypes.data + 8], [16])
    0
    0
    0
    >>> dst
    array([0, 0, 1, 0, 0, 0, 0, 0])
    """

    def __init__(self, *, num_threads: int | None = None, max_blocks: int = 1 << 16) -> None:
        if num_threads is not None:
            num_threads = at_least(1, num_threads, "LocalEngine", "num_threads")
        self.session_id = f"local:{next(_numbers)}"
        self.max_blocks = at_least(1, max_blocks, "LocalEngine", "max_blocks")
        self._num_threads = num_threads
        self._memory = _core.MemoryRanges()
        # Owners of registered memory of pools, by address. The dict is replaced, never changed: a
        # write in flight holds the dict of its begin.
        self._owners: dict[int, list[_core.PoolMemory]] = {}
        self._writes: set[_Write] = set()  # in flight, from or to this engine
        with _changed:
            _engines[self.session_id] = self

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let this engine and its peers use memory: all ranges, or none.

        The code is 0, -1 for an empty range, or -7 if a range overlaps another one of this or an
        earlier call. Memory that the process does not have or cannot write raises ValueError.
        """
        addrs, sizes, owners = _core.ranges_to_register("LocalEngine.register", addrs, sizes)
        with _changed:
            code = self._open()._memory.add(addrs, sizes)
            if code == 0:
                self._owners = self._owners | dict(zip(addrs, owners, strict=True))
            return code

    def unregister(self, addrs: Sequence[int]) -> int:
        """Take all ranges that start at `addrs` from the engine, or none with -3.

        The call waits for writes in flight, so the memory can be freed afterwards.
        """
        addrs = _core.address_list("LocalEngine.unregister: addrs", addrs)
        with _changed:
            code = self._open()._memory.remove(addrs)
            if code == 0:
                gone = set(addrs)
                self._owners = {
                    addr: owners for addr, owners in self._owners.items() if addr not in gone
                }
            self._wait()
            return code

    def write(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Copy ``lengths[i]`` bytes from ``src_addrs[i]`` to ``dst_addrs[i]``.

        The code is 0, or -1 with nothing written if no engine has that session, or a block does not
        lie inside one registered range on either side. A destination must overlap no source and no
        other destination.
        """
        with self._blocks("LocalEngine.write", session, src_addrs, dst_addrs, lengths) as blocks:
            if blocks is None:
                return _OUTSIDE
            blocks.copy(self._num_threads)
        return 0

    def differing(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> list[int]:
        """Return the indices of blocks whose bytes differ from their sources.

        ValueError if `write` would return -1.
        """
        name = "LocalEngine.differing"
        with self._blocks(name, session, src_addrs, dst_addrs, lengths) as blocks:
            if blocks is None:
                raise ValueError(
                    f"{name}: blocks must lie in memory registered here and at session "
                    f"{session!r:.100}"
                )
            return blocks.differing(self._num_threads)

    @contextmanager
    def _blocks(
        self, name: str, session: str, *lists: Sequence[int]
    ) -> Iterator[_core.Blocks | None]:
        """Yield the blocks of a call with their memory kept; None if some is not registered."""
        if not isinstance(session, str):
            raise TypeError(f"{name}: session must be a str, got {type(session).__name__}")
        blocks = _core.Blocks(name, *lists)
        write = peer = None
        try:
            with _changed:
                own, peer = self._open(), _engines.get(session)
                inside = peer is not None and blocks.lie_in(own._memory, peer._memory)
                if inside and peer is not None:
                    write = _Write(own._owners, peer._owners)
                    own._writes.add(write)
                    peer._writes.add(write)
            yield blocks if inside else None
        finally:  # even after Ctrl-C at any line above: else `close` would wait forever
            if write is not None and peer is not None:
                with _changed:
                    self._writes.discard(write)
                    peer._writes.discard(write)
                    _changed.notify_all()

    def close(self) -> None:
        """Wait for writes in flight, then release all memory and leave the peers."""
        with _changed:
            _engines.pop(self.session_id, None)
            self._memory, self._owners = _core.MemoryRanges(), {}
            self._wait()
        forget(self)

    def _open(self) -> LocalEngine:
        if self.session_id not in _engines:
            raise RuntimeError(f"LocalEngine: {self.session_id} is closed")
        return self

    def _wait(self) -> None:
        """Wait until the writes now in flight have ended; later writes see the change."""
        now = set(self._writes)
        _changed.wait_for(lambda: now.isdisjoint(self._writes))

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "LocalEngine: an engine cannot be pickled or copied: peers know its session"
        )


class _Write:
    """Write in flight, which keeps its memory of pools alive."""

    def __init__(self, *owners: object) -> None:
        self._owners = owners
