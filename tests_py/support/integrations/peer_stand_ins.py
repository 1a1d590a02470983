# SPDX-License-Identifier: Apache-2.0
"""Engines of transfers over stand-ins for the packages of Mooncake and NIXL."""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cpattn.integrations import mooncake, nixl

DONE, UNDER_WAY, FAILED = "done", "under way", "failed"


class NotFoundError(Exception):
    """Error without a base class of NIXL, like NIXL's errors."""


class OtherError(Exception):
    pass


class Descriptions(list):
    def __init__(self, kind, ranges=()):
        super().__init__(tuple(x if isinstance(x, str) else int(x) for x in row) for row in ranges)

    def isEmpty(self):
        return not self


class FakeAgent:
    """Agent that records calls; peers answer and writes end at once, unless a test differs."""

    answers = True
    state = DONE
    taken: ClassVar[set[int]] = set()

    def __init__(self, name, config):
        if config.listenPort in self.taken:
            self.taken.remove(config.listenPort)
            raise RuntimeError("Failed to bind metadata listener socket")
        self.name, self.config, self.calls, self.met = name, vars(config), [], set()

    def createBackend(self, name, options):
        self.calls.append((name, options))
        self.transports = os.environ.get("UCX_TLS")

    def registerMem(self, ranges, backends):
        self.calls.append(("register", ranges))

    def deregisterMem(self, ranges, backends):
        self.calls.append(("deregister", ranges))

    def invalidateRemoteMD(self, session):
        self.calls.append("forget")
        self.met.discard(session)

    def fetchRemoteMD(self, session, ip, port, label):
        self.calls.append(("ask", ip, port))
        if self.answers:
            self.met.add(session)

    def checkRemoteMD(self, session, ranges):
        return DONE if session in self.met else FAILED

    def createXferReq(self, operation, sources, targets, session, message, backends):
        self.calls.append((operation, sources, targets))
        return 5

    def postXferReq(self, handle, message):
        return UNDER_WAY

    def getXferStatus(self, handle):
        return self.state

    def releaseXferReq(self, handle):
        self.calls.append("release")


def bindings(make_agent):
    """Return a stand-in of NIXL's module; `make_agent(name, configuration)` makes its agents."""
    return SimpleNamespace(
        nixlAgent=make_agent,
        nixlAgentConfig=SimpleNamespace,
        nixlXferDList=Descriptions,
        nixlRegDList=Descriptions,
        NIXL_THREAD_SYNC_STRICT="strict",
        DRAM_SEG="memory",
        NIXL_WRITE="write",
        NIXL_SUCCESS=DONE,
        NIXL_IN_PROG=UNDER_WAY,
        **{f"nixl{name}Error": OtherError for name in nixl._GONE}
        | {"nixlNotFoundError": NotFoundError},
    )


class FakeMooncake:
    """Stand-in for Mooncake's engine: records calls, and the settings that it would read."""

    code = 0

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def initialize(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        self.settings = {name: value for name, value in os.environ.items() if name[:3] == "MC_"}
        return self.code

    def get_rpc_port(self) -> int:
        return 16000

    def batch_register_memory(self, addrs: list[int], sizes: list[int]) -> int:
        self.calls.append(("register", addrs, sizes))
        return self.code

    def batch_unregister_memory(self, addrs: list[int]) -> int:
        self.calls.append(("unregister", sorted(addrs)))
        return 0

    def batch_transfer_sync_write(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 0


def put_mooncake(patch: pytest.MonkeyPatch) -> list[Any]:
    """Replace Mooncake's package; return the list that receives the engines made later."""
    made: list[Any] = []
    for name in [name for name in os.environ if name.startswith("MC_")]:
        patch.delenv(name)
    make = SimpleNamespace(TransferEngine=lambda: made.append(FakeMooncake()) or made[-1])
    patch.setitem(sys.modules, "mooncake.engine", make)
    patch.setattr(metadata, "version", lambda name: "0.3.13.post1")
    patch.setattr(FakeMooncake, "code", 0)
    return made


def put_nixl(patch: pytest.MonkeyPatch) -> list[Any]:
    """Replace NIXL's package; return the list that receives the agents made later."""
    made: list[Any] = []
    module = bindings(lambda *settings: made.append(FakeAgent(*settings)) or made[-1])
    patch.setitem(sys.modules, "nixl_cu12", SimpleNamespace())
    patch.setitem(sys.modules, "nixl_cu12._bindings", module)
    patch.setattr(metadata, "version", lambda name: "1.5.1")
    for name in ("answers", "state", "taken"):
        patch.setattr(FakeAgent, name, copy.copy(getattr(FakeAgent, name)))
    return made


@dataclass(frozen=True)
class StandIn:
    make: Callable[..., Any]
    module: Any
    peer: str
    #: Least timeout of the engine in seconds.
    least: int
    put: Callable[[pytest.MonkeyPatch], list[Any]]

    @property
    def name(self) -> str:
        return self.make.__name__

    def on_write(self, patch: pytest.MonkeyPatch, act: Callable[[Any], int]) -> None:
        """Make every write call `act` with the foreign engine; its result 0 means success."""
        if self.module is mooncake:
            patch.setattr(FakeMooncake, "batch_transfer_sync_write", lambda fake, *_: act(fake))
        else:
            status = {0: DONE, -1: FAILED}
            patch.setattr(FakeAgent, "getXferStatus", lambda fake, _: status[act(fake)])


STAND_INS = {
    "mooncake": StandIn(mooncake.MooncakeEngine, mooncake, "peer", 5, put_mooncake),
    "nixl": StandIn(nixl.NixlEngine, nixl, "10.0.0.2:7000/00", 1, put_nixl),
}


def ranges_of(calls: list[Any]) -> list[tuple[str, list[int]]]:
    """Return the calls of a foreign engine that register and unregister addresses."""
    return [
        (call[0].replace("de", "un"), [x[0] if isinstance(x, tuple) else x for x in call[1]])
        for call in calls
        if "register" in call[0]
    ]
