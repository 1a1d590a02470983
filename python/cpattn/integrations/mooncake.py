# SPDX-License-Identifier: Apache-2.0
"""The Mooncake transfer engine: writes into the memory of other processes and machines.

    pip install 'mooncake-transfer-engine-non-cuda>=0.3.13.post1'
    apt-get install --no-install-recommends libibverbs1 libnuma1 libcurl4

Behaviour of release 0.3.13.post1 over TCP, found by trials:

- A failed write leaves any part of its blocks written. A write that failed by *timeout* is still in
flight: a peer that was only stopped receives the rest later, with the contents that the source then
has. Closing the sender's engine ends it.
- The peer checks that each target lies inside one range it registered. Sources are not checked.
`unregister` does not wait for writes in flight, whose bytes still arrive: ask the senders before
memory is freed.
- A write fails at once if its peer has ended, and after the timeout if its peer does not answer.
The first contact differs: if a peer accepts a connection but does not answer, because it is
stopped, the engine waits a minute, with a lock that blocks writes to all peers. This module
therefore probes a peer (``send_probe``) before the engine writes there.
- The engine's ``transfer_check_status`` of a batch checks only its first block, so it says nothing
about a batch in flight; its synchronous call polls without sleeping.
- Both listeners of an engine bind all interfaces without authentication: give engines a network, or
a network namespace, of their own.
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

_MIN_VERSION = "0.3.12"  # earlier ones reported success when bytes had left, not arrived
_PACKAGE = "mooncake-transfer-engine"
_VARIANTS = ("-non-cuda", "", "-cuda13", "-npu", "-musa", "-efa-non-cuda", "-efa")
_DEVICE_FREE = ("-non-cuda", "-efa-non-cuda")  # variants that know only memory of the host
_FAILED = -1  # the engine's code for any failure of a write
_UNKNOWN = -3  # its code for a range that is not registered
_GRACE = 2  # seconds that the engine itself may be late


class MooncakeEngine(PeerEngine):
    """Engine that peers in other processes and on other machines reach by ``session_id``.

    Start processes that use it with *spawn*: its threads do not survive a fork. Safe to use from
    several threads.

    Memory of pools stays alive while it is registered, or while a write may still read it. The
    caller must keep any other memory; `cpattn.transfer.register` keeps tensors.

    Parameters
    ----------
    host : str
        Address of this machine for peers.
    protocol, device : str
        "tcp", or another protocol of the installed package, and its devices. With "tcp" no other
        transport is tried.
    timeout : float
        Seconds, 5 to 10^6, to wait for a peer at the first contact, and for one write in addition
        to a nanosecond per byte.
    max_blocks : int
        Blocks per write of ``TransferPlan.execute``; the default works with all releases.
    metadata_server : str
        Place where engines find each other; by default they ask each other.

    Raises
    ------
    ImportError
        If the package, or a system library it needs, is missing, or it is older than 0.3.12.
    RuntimeError
        If the engine does not start, or ``MC_TCP_PROTO=1`` asks for writes that succeed early.

    Examples
    --------
    >>> with MooncakeEngine("192.0.2.1") as engine:  # doctest: +SKIP
    ...     plan.execute(engine, peer_session_id)
    """

    _name = "MooncakeEngine"
    _min_timeout = 5  # the engine silently raises smaller values to this

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
        self._met: set[str] = set()  # sessions whose last write succeeded
        self._registered: dict[int, list[_core.PoolMemory]] = {}

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let peers write to ranges, with the codes of `cpattn.transfer.LocalEngine.register`.

        If the installed package knows devices, only it can check the addresses.
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
        """Take all ranges that start at `addrs` from peers, or none with -3.

        The engine is not asked about unknown ranges: it would drop the other ranges of the call,
        yet refuse to register them again.
        """
        addrs = _core.address_list("MooncakeEngine.unregister: addrs", addrs)
        with self._changed:
            engine, ranges = self._open(), set(addrs)
            if len(ranges) < len(addrs) or not ranges <= self._registered.keys():
                return _UNKNOWN
            code: int = engine.batch_unregister_memory(list(ranges))
            for addr in ranges:
                owners = self._registered.pop(addr)
                if code:  # peers may still write there
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

        The code is 0 if all bytes are in the peer's memory, and -1 for any failure. A peer that
        does not answer gives -1 after `timeout`, and then at once while the engine itself still
        waits for it. A peer that never answered has been sent nothing. Ctrl-C ends the wait, not
        the write: `close` waits for it.
        """
        return self._write_here(session, src_addrs, dst_addrs, lengths)

    def __enter__(self) -> MooncakeEngine:
        return self

    def close(self) -> None:
        """Wait for writes in flight, at most their timeout, then release all memory and end."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._num_writes)
            self._calls.close()  # after writes that their callers no longer await
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
        """Tell whether the peer answers a probe; the engine itself would wait a minute."""
        if not self._probes or session in self._met:
            return True
        answer: int = self._calls.run(session, self._timeout, self._engine.send_probe, session)
        return answer == 0


def _import_engine() -> Any:
    """Return the engine's class, of a release that acknowledges writes after applying them."""
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
    """Return variant and version of the package."""
    found = first_installed(_PACKAGE + variant for variant in _VARIANTS)
    if found is None:
        return "", "an unknown release"  # no number: refused
    name, version = found
    return name.removeprefix(_PACKAGE), version
