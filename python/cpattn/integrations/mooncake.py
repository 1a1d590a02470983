# SPDX-License-Identifier: Apache-2.0
"""The Mooncake transfer engine: writes into the memory of other processes and machines.

    pip install 'mooncake-transfer-engine-non-cuda>=0.3.13.post1'
    apt-get install --no-install-recommends libibverbs1 libnuma1 libcurl4

What release 0.3.13.post1 does over TCP, found out by trying:

- A write that fails leaves any part of its blocks written. One that fails by *timeout* is still in
  flight: a peer that was only stopped receives the rest later, read from the source as it is by
  then. Closing the sender's engine ends it.
- The peer checks that each target lies inside one range it registered. Nobody checks sources.
  `unregister` does not wait for writes in flight, whose bytes go on arriving: ask the senders
  before memory is freed.
- A peer that is gone fails a write at once, one that does not answer fails it after the timeout.
- The engine's ``transfer_check_status`` of a batch looks at its first block only, so nothing can
  be learnt of a batch in flight; its synchronous call polls without sleeping.
- Both listeners of an engine bind all interfaces and ask nobody who they are: give engines a
  network, or a network namespace, of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from typing import Any

_MIN_VERSION = (0, 3, 12)  # before it, success came when the bytes had left, not arrived
_MIN_TIMEOUT = 5  # seconds; the engine raises less to this without a word
_PACKAGE = "mooncake-transfer-engine"
_VARIANTS = ("-non-cuda", "", "-cuda13", "-npu", "-musa", "-efa-non-cuda", "-efa")
_UNKNOWN = -3  # the engine's code for a range that is not registered
_environment_lock = threading.Lock()


class MooncakeEngine:
    """An engine that peers in other processes and on other machines reach by ``session_id``.

    Start processes that use it with *spawn*: it has threads, which do not survive a fork. Safe to
    use from several threads.

    Parameters
    ----------
    host : str
        The address of this machine that peers connect to.
    protocol, device : str
        "tcp", or what else the installed package offers, and its devices. With "tcp" no other
        transport is looked for.
    timeout : float
        Seconds, at least 5, that one write may take on top of a nanosecond per byte.
    max_blocks : int
        Blocks per write of ``TransferPlan.execute``: what all releases carry without stalling.
    metadata_server : str
        Where engines learn of each other; by default from each other.

    Raises
    ------
    ImportError
        The package, or a system library it needs, is missing, or it is older than 0.3.12.
    RuntimeError
        The engine does not start, or ``MC_TCP_PROTO=1`` asks for writes that succeed early.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        protocol: str = "tcp",
        device: str = "",
        timeout: float = 30,
        max_blocks: int = 512,
        metadata_server: str = "P2PHANDSHAKE",
    ) -> None:
        if not _MIN_TIMEOUT <= timeout < math.inf:  # refuses nan, too
            raise ValueError(
                f"MooncakeEngine: timeout must be >= {_MIN_TIMEOUT} and finite, got {timeout}"
            )
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise RuntimeError("MooncakeEngine: MC_TCP_PROTO=1 reports writes before they arrive")
        make_engine = _import_engine()
        settings = {"MC_TRANSFER_TIMEOUT": str(math.ceil(timeout))}
        if protocol == "tcp":
            settings["MC_FORCE_TCP"] = "1"
        with _environment(settings):
            engine = make_engine()
            code = engine.initialize(host, metadata_server, protocol, device)
        if code != 0:
            raise RuntimeError(f"MooncakeEngine: the engine on {host} does not start: code {code}")
        self.session_id = f"{host}:{engine.get_rpc_port()}"
        self.max_blocks = max_blocks
        self._engine: Any = engine
        self._registered: set[int] = set()
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(thread_name_prefix="MooncakeEngine")

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let peers write to ``sizes[i]`` bytes at ``addrs[i]``: to all ranges, or none.

        0; -1 for an empty range; -7 where a range overlaps another, of this call or before.
        """
        if len(addrs) != len(sizes):  # the engine would read beyond the shorter list
            raise ValueError(
                "MooncakeEngine.register: addrs and sizes must be equally many, got "
                f"{len(addrs)} and {len(sizes)}"
            )
        with self._lock:
            code: int = self._open().batch_register_memory(list(addrs), list(sizes))
            if code == 0:
                self._registered.update(addrs)
            return code

    def unregister(self, addrs: Sequence[int]) -> int:
        """End that, for all the ranges that start at `addrs` or, with -3, for none.

        The engine is not asked for what it does not know: it would drop the other ranges of the
        call, yet refuse to register them again.
        """
        with self._lock:
            engine, ranges = self._open(), set(addrs)
            if len(ranges) < len(addrs) or not ranges <= self._registered:
                return _UNKNOWN
            self._registered -= ranges
            return engine.batch_unregister_memory(list(ranges))

    def write(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Copy ``lengths[i]`` bytes from ``src_addrs[i]`` here to ``dst_addrs[i]`` at the peer.

        The engine's code: 0 when all bytes are in the peer's memory, -1 for all that can go wrong.
        Ctrl-C ends the wait, not the write: `close` waits for it.
        """
        return self.write_async(session, src_addrs, dst_addrs, lengths).result()

    def write_async(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> Future[int]:
        """The same on another thread: its ``done()`` and ``result(timeout)`` tell the status.

        For work beside a transfer; writes side by side are no faster than one after the other.
        """
        lists = list(src_addrs), list(dst_addrs), list(lengths)
        with self._lock:  # `close` waits for what has been submitted, and nothing is behind it
            call = self._open().batch_transfer_sync_write  # releases the GIL
            return self._writers.submit(call, session, *lists)

    def close(self) -> None:
        """Wait for writes in flight, at most their timeout, then release all memory and end."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                self._writers.shutdown()
                engine.batch_unregister_memory(list(self._registered))
                self._registered.clear()

    def _open(self) -> Any:
        if self._engine is None:
            raise RuntimeError(f"MooncakeEngine: {self.session_id} is closed")
        return self._engine

    def __enter__(self) -> MooncakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _import_engine() -> Any:
    """The engine's class, of a release that acknowledges writes when they have been applied."""
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise ImportError(
            f"MooncakeEngine: {error}; install '{_PACKAGE}-non-cuda>=0.3.13.post1' with pip and "
            "libibverbs1 libnuma1 libcurl4 with apt"
        ) from error
    version = _installed_version()
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _MIN_VERSION:
        raise ImportError(
            f"MooncakeEngine: needs {_PACKAGE} >= 0.3.12, which acknowledges writes only once "
            f"they have been applied, got {version}"
        )
    return engine


def _installed_version() -> str:
    for variant in _VARIANTS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(_PACKAGE + variant)
    return "an unknown release"  # no number: refused


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """The engine is set up by variables, read while it starts; the process keeps its own."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
