# SPDX-License-Identifier: Apache-2.0
"""Processes with transfer engines: a call names a function of a module, which a peer runs with its
`State` first. A call that takes too long is an error, and a process ends with its block."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpattn.integrations.mooncake import MooncakeEngine
from cpattn.transfer import TransferEngine
from support.transfer.engines import MOONCAKE

TIMEOUT = 60.0  # seconds for a call or a start, on a busy machine

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def requires_mooncake() -> None:
    MOONCAKE.require()


class State(SimpleNamespace):
    """Values that functions of a peer keep between calls, such as the engine."""

    engine: TransferEngine


class Peer:
    """Spawned process with its own engine and, if allowed, its own network namespace.

    `network_of` shares the namespace of a living process; `make_engine` is called in the process
    with `settings`.
    """

    def __init__(
        self,
        *,
        network_of: Peer | None = None,
        make_engine: Callable[..., Any] = MooncakeEngine,
        **settings: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, network_of and network_of.pid, make_engine, settings)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.session_id: str = self.result()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> Any:
        """Return ``function(state, *arguments)`` of the process, or raise its error."""
        self.start(function, *arguments)
        return self.result(timeout)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._connection.send((function, arguments))

    def result(self, timeout: float = TIMEOUT) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"process {self.pid} has not answered in {timeout} s")
        value, error, details = self._connection.recv()  # EOFError: the process has died
        if error is not None:
            raise error from RuntimeError(details)
        return value

    def stop(self) -> None:
        """Freeze the process with all its threads; `resume` continues it."""
        os.kill(self.pid, signal.SIGSTOP)
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self.process.join(5)
        self.kill()
        self._connection.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self.kill()
        self.close()


def _serve(connection: Connection, network: int | None, make_engine: Any, settings: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    try:
        enter_network(network)
        with make_engine(**settings) as engine:
            connection.send((engine.session_id, None, ""))
            state = State(engine=engine)
            while (call := connection.recv()) is not None:
                function, arguments = call
                try:
                    connection.send((function(state, *arguments), None, ""))
                except Exception as error:
                    connection.send((None, error, traceback.format_exc()))
    except EOFError:
        pass  # the test has ended
    except Exception as error:
        connection.send((None, error, traceback.format_exc()))


def enter_network(pid: int | None) -> None:
    """Enter a new network namespace with the loopback device up, or the namespace of a process.

    Engines listen on all interfaces, so this separates them. It needs root; otherwise the processes
    share the network of the machine.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if pid is not None:
        with open(f"/proc/{pid}/ns/net") as namespace:
            libc.setns(namespace.fileno(), _CLONE_NEWNET)
    elif libc.unshare(_CLONE_NEWNET) == 0:
        with socket.socket() as device:
            request = struct.pack("16sh", b"lo", 0)
            name, flags = struct.unpack("16sh", fcntl.ioctl(device, _SIOCGIFFLAGS, request))
            fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sh", name, flags | _IFF_UP))


# Functions for peers.


def allocate(state: State, name: str, nbytes: int, value: int, register: bool = True) -> int:
    """Make memory full of a value, let peers write to it, and return its address.

    Zeros take no memory before they are written.
    """
    buffer = np.full(nbytes, value, np.uint8) if value else np.zeros(nbytes, np.uint8)
    setattr(state, name, buffer)
    address = buffer.ctypes.data
    if register:
        assert state.engine.register([address], [nbytes]) == 0
    return address


def contents(state: State, name: str, begin: int = 0, end: int | None = None) -> bytes:
    return getattr(state, name)[begin:end].tobytes()


def write(state: State, session: str, name: str, blocks: Any) -> tuple[int, float]:
    """Write blocks (offset in a buffer, address at the peer, bytes); return code and seconds."""
    base = getattr(state, name).ctypes.data
    offsets, addresses, lengths = map(list, zip(*blocks, strict=True)) if blocks else ([], [], [])
    begin = time.monotonic()
    code = state.engine.write(session, [base + x for x in offsets], addresses, lengths)
    return code, time.monotonic() - begin
