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
  Not so at the first contact: a peer that accepts a connection and does not answer, because it is
  stopped, is waited for a minute, and so are all other peers, for a lock is held meanwhile. So this
  module asks a peer for a sign of life (``send_probe``) before the engine is to write there.
- The engine's ``transfer_check_status`` of a batch looks at its first block only, so nothing can
  be learnt of a batch in flight; its synchronous call polls without sleeping.
- Both listeners of an engine bind all interfaces and ask nobody who they are: give engines a
  network, or a network namespace, of their own.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

from .. import _core
from ..transfer.bounded import BoundedCalls, CallHangs
from ..transfer.registration import forget
from ._peer_engine import PeerEngine, variables
from ._support import first_installed, precedes

__all__ = ["MooncakeEngine"]

_MIN_VERSION = "0.3.12"  # before it, success came when the bytes had left, not arrived
_PACKAGE = "mooncake-transfer-engine"
_VARIANTS = ("-non-cuda", "", "-cuda13", "-npu", "-musa", "-efa-non-cuda", "-efa")
_DEVICE_FREE = ("-non-cuda", "-efa-non-cuda")  # variants that know no memory but that of the host
_FAILED = -1  # the engine's code for all that can go wrong with a write
_UNKNOWN = -3  # and for a range that is not registered
_GRACE = 2  # seconds that the engine may be late by itself


class MooncakeEngine(PeerEngine):
    """An engine that peers in other processes and on other machines reach by ``session_id``.

    Start processes that use it with *spawn*: it has threads, which do not survive a fork. Safe to
    use from several threads.

    Memory of pools stays as long as it is registered, or as a write that reads it may be in flight.
    Any other memory belongs to the caller; `cpattn.transfer.register` keeps tensors.

    Parameters
    ----------
    host : str
        The address of this machine that peers connect to.
    protocol, device : str
        "tcp", or what else the installed package offers, and its devices. With "tcp" no other
        transport is looked for.
    timeout : float
        Seconds, 5 to 10^6, that a peer is waited for at the first contact, and that one write may
        then take on top of a nanosecond per byte.
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

    Examples
    --------
    >>> with MooncakeEngine("192.0.2.1") as engine:  # doctest: +SKIP
    ...     plan.execute(engine, peer_session_id)
    """

    _name = "MooncakeEngine"
    _min_timeout = 5  # the engine raises less to this without a word

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
        seconds = self._limits(timeout, max_blocks)
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise RuntimeError("MooncakeEngine: MC_TCP_PROTO=1 reports writes before they arrive")
        make_engine = _import_engine()
        self._timeout = math.ceil(seconds)
        settings = {"MC_TRANSFER_TIMEOUT": str(self._timeout)}
        if protocol == "tcp":
            settings["MC_FORCE_TCP"] = "1"
        with variables(settings):
            engine = make_engine()
            code = engine.initialize(host, metadata_server, protocol, device)
        if code != 0:
            raise RuntimeError(f"MooncakeEngine: the engine on {host} does not start: code {code}")
        self.session_id = f"{host}:{engine.get_rpc_port()}"
        self._probes = metadata_server == "P2PHANDSHAKE" and hasattr(engine, "send_probe")
        self._on_host = _installed()[0] in _DEVICE_FREE
        self._engine: Any = engine
        super().__init__()
        self._calls = BoundedCalls("MooncakeEngine")
        self._met: set[str] = set()  # sessions whose last write was right
        self._registered: dict[int, list[_core.PoolMemory]] = {}

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let peers write to ``sizes[i]`` bytes at ``addrs[i]``: to all ranges, or none.

        0; -1 for an empty range; -7 where a range overlaps another, of this call or before. What
        is not memory of this process, or cannot be written, is ValueError, unless the installed
        package knows devices, whose addresses only it can judge.
        """
        addrs, sizes, owners = _core.ranges_to_register(
            "MooncakeEngine.register", addrs, sizes, self._on_host
        )
        with self._changed:
            code: int = self._open().batch_register_memory(addrs, sizes)
            if code == 0:
                self._registered.update(zip(addrs, owners, strict=True))
            return code

    def unregister(self, addrs: Sequence[int]) -> int:
        """End that, for all the ranges that start at `addrs` or, with -3, for none.

        The engine is not asked for what it does not know: it would drop the other ranges of the
        call, yet refuse to register them again.
        """
        addrs = _core.address_list("MooncakeEngine.unregister: addrs", addrs)
        with self._changed:
            engine, ranges = self._open(), set(addrs)
            if len(ranges) < len(addrs) or not ranges <= self._registered.keys():
                return _UNKNOWN
            code: int = engine.batch_unregister_memory(list(ranges))
            for addr in ranges:
                owners = self._registered.pop(addr)
                if code:  # who knows whether peers still write there
                    self._in_doubt.update(owners)
            return code

    def write(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Copy ``lengths[i]`` bytes from ``src_addrs[i]`` here to ``dst_addrs[i]`` at the peer.

        The engine's code: 0 when all bytes are in the peer's memory, -1 for all that can go wrong.
        A peer that does not answer is -1 after `timeout`, and then at once for as long as the
        engine itself still waits for it; nothing has been sent to a peer that never answered.
        Ctrl-C ends the wait, not the write: `close` waits for it.
        """
        return self._write_here(session, src_addrs, dst_addrs, lengths)

    def __enter__(self) -> MooncakeEngine:
        return self

    def close(self) -> None:
        """Wait for writes in flight, at most their timeout, then release all memory and end."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._num_writes)
            self._calls.close()  # after writes whose callers have left
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.batch_unregister_memory(list(self._registered))
            self._registered.clear()
            self._in_doubt.clear()
        forget(self)

    def _open(self) -> Any:
        self._check_open()
        return self._engine

    def _write(self, session: str, blocks: _core.Blocks) -> int:
        owners = blocks.source_owners()
        code = _FAILED
        try:
            if self._meets(session):
                limit = self._timeout + blocks.num_bytes * 1e-9 + _GRACE
                write = self._engine.batch_transfer_sync_write  # releases the GIL
                code = self._calls.run(session, limit, write, session, *blocks.lists())
        except CallHangs:
            pass
        finally:
            with self._changed:
                if code == 0:
                    self._met.add(session)
                else:
                    self._met.discard(session)
                    self._in_doubt.update(owners)
        return code

    def _meets(self, session: str) -> bool:
        """Whether the peer has shown that it is there: the engine itself would wait a minute."""
        if not self._probes or session in self._met:
            return True
        answer: int = self._calls.run(session, self._timeout, self._engine.send_probe, session)
        return answer == 0


def _import_engine() -> Any:
    """The engine's class, of a release that acknowledges writes when they have been applied."""
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise ImportError(
            f"MooncakeEngine: {error}; install '{_PACKAGE}-non-cuda>=0.3.13.post1' with pip and "
            "libibverbs1 libnuma1 libcurl4 with apt"
        ) from error
    _, version = _installed()
    if precedes(version, _MIN_VERSION):
        raise ImportError(
            f"MooncakeEngine: needs {_PACKAGE} >= {_MIN_VERSION}, which acknowledges writes only "
            f"once they have been applied, got {version}"
        )
    return engine


def _installed() -> tuple[str, str]:
    """Variant and version of the package."""
    found = first_installed(_PACKAGE + variant for variant in _VARIANTS)
    if found is None:
        return "", "an unknown release"  # no number: refused
    name, version = found
    return name.removeprefix(_PACKAGE), version
