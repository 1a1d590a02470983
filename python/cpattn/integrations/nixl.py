# SPDX-License-Identifier: Apache-2.0
"""NIXL as a transfer engine: writes into the memory of other processes and machines, over UCX.

    pip install --no-deps nixl-cu12==1.5.1

Neither CUDA nor a system package is needed; torch, which pip would install, is not imported.
Behaviour of release 1.5.1 over TCP, found by trials:

- A sender learns from the peer's listener which ranges it has registered, and **only the sender
checks a target**: the peer applies any bytes that arrive, even where it has unregistered memory.
Asking again does not make NIXL forget old answers. This module therefore drops them and asks anew
before each write, unless ``recheck`` is off.
- A question and its answer take 90 ms on a connection in use, as the kernel delays the bytes after
the length of a message.
- Sources must be registered as well. All blocks of a write are checked before any is sent.
- A write that fails because the peer was killed leaves any part of its blocks written. A write that
failed by *timeout* is still in flight, although NIXL is told to cancel it and to disconnect: a peer
that was only stopped receives the rest later, with the contents that the source then has, even if
it was unregistered. Closing the sender's engine ends it.
- If a peer is killed during a write, the write fails at once. If it is stopped, has closed its
engine or never existed, it does not answer a question, and NIXL gives no reason: the write fails
after the timeout, with nothing sent.
- NIXL registers overlapping ranges, empty ranges and invalid memory. This module computes the codes
of `register` and `unregister`.
- The thread that moves bytes spins, a core for each engine, unless a delay is set. NIXL's Python
wrapper cannot set it, so this module uses the bindings below the wrapper.
- NIXL's listener binds all interfaces, UCX's the address of each device, both without
authentication: give engines a network, or a network namespace, of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _core
from ..transfer.registration import forget
from ._peer_engine import PeerEngine, variables
from ._support import first_installed, precedes

__all__ = ["NixlEngine"]

_MIN_VERSION = "1.5.1"  # by their sources, listeners of older ones throw when a peer goes
_VARIANTS = ("nixl-cu12", "nixl-cu13")
_FAILED = -1  # the code for any failure of a write
_GONE = "Backend", "Cancelled", "NotFound", "RemoteDisconnect", "Unknown"  # errors of such a write
_DELAY = 1000  # microseconds between polls of NIXL's threads; with 0 they would spin
_PAUSES = 20e-6, 1e-3  # seconds between polls of a write, from the first to the last
_PORT_TRIALS = 16  # another process may take a port between its choice and its use
_SESSION = re.compile(r"(\d+\.\d+\.\d+\.\d+):(\d{1,5})/[0-9a-f]+")


class NixlEngine(PeerEngine):
    """Engine that peers in other processes and on other machines reach by ``session_id``.

    Start processes that use it with *spawn*: its threads do not survive a fork. Safe to use from
    several threads; writes to one peer take turns.

    Memory of pools stays alive while it is registered, or while a write may still read it. The
    caller must keep any other memory; `cpattn.transfer.register` keeps tensors.

    Parameters
    ----------
    host : str
        IPv4 address of this machine for peers.
    transports : str
        Transports that UCX may use, in the form of its variable ``UCX_TLS``; "" leaves them to the
        environment, which also has all other variables of UCX, such as ``UCX_NET_DEVICES``.
    timeout : float
        Seconds, 1 to 10^6, that one write may take in addition to a nanosecond per byte, questions
        to the peer included.
    max_blocks : int
        Blocks per write of ``TransferPlan.execute``.
    recheck : bool
        Whether to ask the peer before each write for its registered ranges. False asks only if a
        target is not in the last answer, which saves 90 ms per write. Only for peers that never
        unregister while senders may write: **writes to unregistered memory still go through**.

    Raises
    ------
    ImportError
        If the package is missing, or older than 1.5.1.
    RuntimeError
        If NIXL's agent does not start.

    Examples
    --------
    >>> with NixlEngine("192.0.2.1") as engine:  # doctest: +SKIP
    ...     plan.execute(engine, peer_session_id)
    """

    _name = "NixlEngine"
    _min_timeout = 1  # asking a peer takes a tenth, on a busy machine more

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        transports: str = "tcp",
        timeout: float = 30,
        max_blocks: int = 4096,
        recheck: bool = True,
    ) -> None:
        seconds = self._limits(timeout, max_blocks)
        for name, value, kind in (
            ("host", host, str),
            ("transports", transports, str),
            ("recheck", recheck, bool),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"NixlEngine: {name} must be a {kind.__name__}, got {type(value).__name__}"
                )
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"NixlEngine: host must be an IPv4 address, got {host!r}") from None
        self._timeout = seconds
        self._recheck = recheck
        self._nixl = _import_bindings()
        settings = {"UCX_TLS": transports} if transports else {}
        with variables(settings):
            agent, self.session_id = _start(self._nixl, host)
        self._gone = tuple(getattr(self._nixl, f"nixl{name}Error") for name in _GONE)
        self._agent: Any = agent
        super().__init__()
        self._turns: dict[str, threading.Lock] = {}  # for writes to each peer
        self._memory = _core.MemoryRanges()  # registered ranges, for the codes
        self._registered: dict[int, tuple[int, list[_core.PoolMemory]]] = {}

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let peers write to ranges, with the codes of `cpattn.transfer.LocalEngine.register`."""
        addrs, sizes, owners = _core.ranges_to_register("NixlEngine.register", addrs, sizes)
        with self._changed:
            agent = self._open()
            code = self._memory.add(addrs, sizes)
            if code == 0 and addrs:
                try:
                    agent.registerMem(self._regions(addrs, sizes), [])
                except BaseException:
                    self._memory.remove(addrs)
                    raise
                self._registered.update(zip(addrs, zip(sizes, owners, strict=True), strict=True))
            return code

    def unregister(self, addrs: Sequence[int]) -> int:
        """Take all ranges that start at `addrs` from peers, or none with -3.

        The call does not wait for writes in flight, whose bytes still arrive. Over TCP only the
        senders' knowledge prevents later writes: see ``recheck``.
        """
        addrs = _core.address_list("NixlEngine.unregister: addrs", addrs)
        with self._changed:
            agent = self._open()
            code = self._memory.remove(addrs)
            if code == 0 and addrs:
                sizes = [self._registered[addr][0] for addr in addrs]
                try:
                    agent.deregisterMem(self._regions(addrs, sizes), [])
                finally:
                    for addr in addrs:
                        del self._registered[addr]
            return code

    def write(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Copy ``lengths[i]`` bytes from ``src_addrs[i]`` here to ``dst_addrs[i]`` at the peer.

        The code is 0 if all bytes are in the peer's memory, and -1 for any failure. Nothing is
        written if a block does not lie inside one registered range on each side. A peer that does
        not answer gives -1 after `timeout`. Ctrl-C ends the wait, not the write, which `close`
        ends.
        """
        return self._write_here(session, src_addrs, dst_addrs, lengths)

    def __enter__(self) -> NixlEngine:
        return self

    def close(self) -> None:
        """Wait for writes in flight, at most their timeout, then end writes that were given up."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._num_writes)
            if self._registered:
                addrs = list(self._registered)
                sizes = [size for size, _ in self._registered.values()]
                self._agent.deregisterMem(self._regions(addrs, sizes), [])
            self._agent = None  # no other reference is left, so this ends it
            self._memory = _core.MemoryRanges()
            self._registered.clear()
            self._in_doubt.clear()
        forget(self)

    def _open(self) -> Any:
        self._check_open()
        return self._agent

    def _write(self, session: str, blocks: _core.Blocks) -> int:
        deadline = time.monotonic() + self._timeout + blocks.num_bytes * 1e-9
        with self._changed:
            turn = self._turns.setdefault(session, threading.Lock())
        left = max(0.0, deadline - time.monotonic())
        if not turn.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            return _FAILED
        try:
            return self._transfer(session, blocks, deadline)
        finally:
            turn.release()

    def _transfer(self, session: str, blocks: _core.Blocks, deadline: float) -> int:
        code, owners = _FAILED, blocks.source_owners()
        try:
            sources, targets = self._descriptions(blocks)
            if sources.isEmpty():  # NIXL has no transfer without blocks
                code = 0
            elif self._meets(session, targets, deadline):
                handle = self._agent.createXferReq(
                    self._nixl.NIXL_WRITE, sources, targets, session, "", []
                )
                try:
                    code = self._finish(handle, deadline)
                finally:
                    with contextlib.suppress(*self._gone):  # some cannot be cancelled
                        self._agent.releaseXferReq(handle)
        except self._gone:
            pass
        finally:
            if code:
                self._forget(session)
                with self._changed:
                    self._in_doubt.update(owners)
        return code

    def _forget(self, session: str) -> None:
        """Drop a peer's answers, and the connection to it with all messages under way."""
        if session != self.session_id:
            self._agent.invalidateRemoteMD(session)

    def _meets(self, session: str, targets: Any, deadline: float) -> bool:
        """Tell whether the peer has told its registered ranges; ask it if necessary."""
        if session == self.session_id:
            return True
        found = _SESSION.fullmatch(session)
        if found is None or int(found[2]) >= 1 << 16:
            return False  # not the name of such an engine
        known = self._nixl.NIXL_SUCCESS
        if not self._recheck and self._agent.checkRemoteMD(session, targets) == known:
            return True
        self._forget(session)
        self._agent.fetchRemoteMD(session, found[1], int(found[2]), "")
        anything = self._nixl.nixlXferDList(self._nixl.DRAM_SEG)
        looks = _looks(deadline)
        return any(self._agent.checkRemoteMD(session, anything) == known for _ in looks)

    def _finish(self, handle: int, deadline: float) -> int:
        """Start a write and wait for its end."""
        state = self._agent.postXferReq(handle, "")
        for _ in _looks(deadline):
            if state != self._nixl.NIXL_IN_PROG:
                break
            state = self._agent.getXferStatus(handle)
        return 0 if state == self._nixl.NIXL_SUCCESS else _FAILED

    def _descriptions(self, blocks: _core.Blocks) -> tuple[Any, Any]:
        """Return NIXL's descriptions of sources and targets of the non-empty blocks."""
        table = np.array(blocks.lists(), np.uint64).T
        table = table[table[:, 2] > 0]
        columns = np.zeros((2, len(table), 3), np.uint64)  # address, length, device number
        columns[:, :, 0] = table[:, :2].T
        columns[:, :, 1] = table[:, 2]
        sources, targets = (self._nixl.nixlXferDList(self._nixl.DRAM_SEG, x) for x in columns)
        return sources, targets

    def _regions(self, addrs: Sequence[int], sizes: Sequence[int]) -> Any:
        ranges = [(addr, size, 0, "") for addr, size in zip(addrs, sizes, strict=True)]
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, ranges)


def _looks(deadline: float) -> Iterator[None]:
    """Yield with growing pauses until the deadline; short writes end before the first long one."""
    pause, longest = _PAUSES
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _start(nixl: Any, host: str) -> tuple[Any, str]:
    """Start an agent with its own listener; return it and its name, which has the address."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = config.useListenThread = True
    config.pthrDelay = config.lthrDelay = _DELAY
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
    for trial in range(_PORT_TRIALS):
        config.listenPort = _free_port()
        name = f"{host}:{config.listenPort}/{secrets.token_hex(8)}"
        try:
            agent = nixl.nixlAgent(name, config)
            agent.createBackend("UCX", {})
        except Exception as error:
            if trial + 1 == _PORT_TRIALS or "bind" not in str(error):
                raise RuntimeError(
                    f"NixlEngine: the agent on {host} does not start: {error}"
                ) from error
        else:
            return agent, name
    raise AssertionError("not reached")


def _free_port() -> int:
    """Return a free port of this machine, as NIXL does not tell the port that it got."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _import_bindings() -> Any:
    """Import the bindings below NIXL's wrapper, without the imports of the wrapper."""
    name, version = first_installed(_VARIANTS) or (_VARIANTS[0], "an unknown release")
    try:
        bindings = importlib.import_module(f"{name.replace('-', '_')}._bindings")
    except ImportError as error:
        raise ImportError(
            f"NixlEngine: {error}; install it by pip install --no-deps {_VARIANTS[0]}==1.5.1"
        ) from error
    if precedes(version, _MIN_VERSION):
        raise ImportError(f"NixlEngine: needs {name} >= {_MIN_VERSION}, got {version}")
    return bindings
