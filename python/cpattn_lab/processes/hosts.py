# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: network namespaces, each with a cable to a switch.

    with Hosts(2, link_gbps=1.0) as hosts:
        Role("rank 0", "package.module.Class", 0, config, namespace=hosts.path(0))

The namespaces have no name: they are file descriptors of this process. The kernel removes them with
their cables when the last process in them ends, in any way. No interface of the machine itself
changes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import TypeVar

INTERFACE = "eth0"  # each host has it beside its loopback
MAX_HOSTS = 64
_CLONE_NEWNET = 0x40000000
_BRIDGE = "switch"
_QUEUE = "100ms"  # longest wait of a packet for its turn on a cable
_BURST_SECONDS, _LEAST_BURST = 1e-3, 128 << 10  # bytes: two of the kernel's largest packets
Result = TypeVar("Result")


class HostsError(RuntimeError):
    """A process may not or cannot make hosts; the message names what is missing."""


class Hosts:
    """Hosts, from `address` to `address`; a context manager that removes them at its end.

    `link_gbps` is the rate of each cable per direction; None: no limit.
    """

    def __init__(self, num_hosts: int, *, link_gbps: float | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"Hosts: num_hosts must be from 1 to {MAX_HOSTS}, got {num_hosts}")
        self.num_hosts = num_hosts
        self.link_gbps = link_gbps
        self._hosts: list[int] = []  # file descriptors
        self._switch: int | None = None

    def __enter__(self) -> Hosts:
        for command in ("ip", "tc") if self.link_gbps else ("ip",):
            if which(command) is None:
                raise HostsError(f"hosts need the command {command}, of iproute2")
        try:
            self._make()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def path(self, host: int) -> str:
        """Return the path for `enter`, in a process started by this one."""
        return f"/proc/{os.getpid()}/fd/{self._hosts[host]}"

    def address(self, host: int) -> str:
        """Return the address of a host in their network, a range for benchmarks (RFC 2544)."""
        return f"198.18.0.{host + 1}"

    def received_bytes(self) -> list[int]:
        """Return the bytes that each host has received over its cable, with headers."""
        return [_in_namespace(host, _received_bytes) for host in self._hosts]

    def _make(self) -> None:
        self._switch = _in_thread(_new_namespace)
        self._ip(self._switch, "link", "add", _BRIDGE, "type", "bridge")
        self._ip(self._switch, "link", "set", _BRIDGE, "up")
        for host in range(self.num_hosts):
            self._hosts.append(_in_thread(_new_namespace))
            port, end = f"port{host}", ("name", INTERFACE, "netns", self.path(host))
            self._ip(self._switch, "link", "add", port, "type", "veth", "peer", *end)
            self._ip(self._switch, "link", "set", port, "master", _BRIDGE, "up")
            address = f"{self.address(host)}/24"
            self._ip(self._hosts[host], "address", "add", address, "dev", INTERFACE)
            self._ip(self._hosts[host], "link", "set", INTERFACE, "up")
            self._ip(self._hosts[host], "link", "set", "lo", "up")
            if self.link_gbps:
                self._limit(self._hosts[host], INTERFACE, self.link_gbps)
                self._limit(self._switch, port, self.link_gbps)

    def _ip(self, namespace: int, *arguments: str) -> None:
        _run(namespace, ["ip", *arguments], "hosts need bridges and veth cables")

    def _limit(self, namespace: int, interface: str, gbps: float) -> None:
        """Limit the rate of outgoing data of an interface."""
        burst = max(int(gbps * 1e9 / 8 * _BURST_SECONDS), _LEAST_BURST)
        command = ["tc", "qdisc", "add", "dev", interface, "root", "tbf"]
        command += ["rate", f"{int(gbps * 1e9)}bit", "burst", str(burst), "latency", _QUEUE]
        _run(namespace, command, "cables with a rate need the token bucket filter of the kernel")

    def _close(self) -> None:
        for namespace in (*self._hosts, self._switch):
            if namespace is not None:
                with suppress(OSError):
                    os.close(namespace)
        self._hosts, self._switch = [], None


def enter(path: str) -> None:
    """Move this thread, and threads that it starts later, to a host."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(namespace)
    finally:
        os.close(namespace)


def _new_namespace() -> int:
    """Return a descriptor of a new network namespace, which this thread enters."""
    if _libc().unshare(_CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        raise HostsError(
            "hosts need network namespaces, for which a process must be root or have the "
            f"capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN: {reason}"
        )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _set_namespace(namespace: int) -> None:
    if _libc().setns(namespace, _CLONE_NEWNET):
        raise HostsError(f"entering a host: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "setns"):
        raise HostsError("hosts need the network namespaces of Linux")
    return libc


def _run(namespace: int, command: list[str], need: str) -> None:
    """Run a command on a host; `need` names what is missing if it fails."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = _in_namespace(namespace, run)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise HostsError(f"{need}: {' '.join(command)}: {said}")


def _in_namespace(namespace: int, function: Callable[[], Result]) -> Result:
    """Return the result of a function that runs on a host."""

    def run() -> Result:
        _set_namespace(namespace)
        return function()

    return _in_thread(run)


def _in_thread(function: Callable[[], Result]) -> Result:
    """Run a function in a new thread, as a thread enters a namespace until it ends."""
    with ThreadPoolExecutor(1, "cpattn hosts") as pool:
        return pool.submit(function).result()


def _received_bytes() -> int:
    """Return the bytes that the interface of this thread's host has received."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[0])
    return 0
