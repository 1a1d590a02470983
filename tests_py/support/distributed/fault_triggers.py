# SPDX-License-Identifier: Apache-2.0
"""Faults of a rank in a round, at one of its calls."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.distributed.transport import exchange, host, shared_memory, versions
from support.distributed.fault_rounds import AGREED, Round

ALLOCATORS = (
    (torch, "empty"), (torch, "zeros"), (torch, "cat"), (torch, "empty_like"),
    (torch.Tensor, "new_empty"), (torch.Tensor, "index_select"), (torch.Tensor, "new_zeros"),
)  # fmt: skip
STOPS = ("stop", "stop for a moment", "stop and kill")


class Trigger:
    """Counts the calls of the culprit while it is armed, and causes the fault at one of them."""

    def __init__(self, one: Round, board: Any) -> None:
        self.round, self.board = one, board
        self.armed = self.fired = False
        self._count = 0

    def install(self) -> None:
        fault = self.round.fault
        if fault == "memory":
            for owner, name in ALLOCATORS:
                self._wrap(owner, name)
            return
        if fault in ("truncate", "version"):
            self._install_from_the_start(fault)
        if fault in AGREED or fault == "none" or fault.startswith("late"):
            return
        for owner, name in (
            (dist, "isend"), (dist, "irecv"), (exchange.RowExchange, "finish"),
            (host.HostGroup, "meet"), (_core, "write_slot_rows"),
        ):  # fmt: skip
            self._wrap(owner, name)

    def _install_from_the_start(self, fault: str) -> None:
        if fault == "version":
            own_values = versions.own_values
            versions.own_values = lambda layout: own_values(layout + 1)  # type: ignore[assignment]
            self.board.value = time.monotonic()
            return
        sealed = shared_memory.sealed_file

        def truncated(name: str, num_bytes: int) -> int:
            if not self.armed:
                return sealed(name, num_bytes)
            self.board.value = time.monotonic()
            self.fired = True
            fd = sealed(name, num_bytes // 4)
            try:
                os.ftruncate(fd, 0)
            except PermissionError:
                return fd
            raise AssertionError("a sealed file was cut off")

        shared_memory.sealed_file = truncated  # type: ignore[assignment]

    def _wrap(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self._event()
            return real(*arguments, **options)

        setattr(owner, name, counted)

    def _event(self) -> None:
        if not self.armed:
            return
        self._count += 1
        if self._count == self.round.event + 1:
            self.armed, self.fired = False, True
            self._do()

    def _do(self) -> None:
        action: Callable[[], None] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "kill in flight": self._kill_soon,
            **dict.fromkeys(STOPS, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
            "memory": _raise_memory_error,
            "cut all cables": lambda: cut_cables(None),
            "cut a cable": lambda: cut_cables(self.round.seed),
        }[self.round.fault]
        self.board.value = time.monotonic()
        action()

    def _kill_soon(self) -> None:
        def kill() -> None:
            end = time.monotonic() + self.round.delay
            while time.monotonic() < end:
                pass
            self.board.value = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


def _raise_memory_error() -> None:
    raise MemoryError("no scratch for this rank")


def sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                one.getpeername()
            found.append(int(name))
        except OSError:  # the socket is closed by now, or it listens
            continue
    return sorted(found)


def cut_cables(seed: int | None) -> None:
    connections = sockets()
    if seed is not None and connections:
        connections = [random.Random(seed).choice(connections)]
    for fd in connections:
        with socket.socket(fileno=os.dup(fd)) as one:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end has closed it
                continue
