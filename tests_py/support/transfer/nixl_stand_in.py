# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the bindings of NIXL, which notes what is asked of it."""

import os
from types import SimpleNamespace
from typing import ClassVar

from cpattn.integrations import nixl

DONE, UNDER_WAY, FAILED = "done", "under way", "failed"


class NotFoundError(Exception):
    """Error without a base of NIXL's own, as theirs have none."""


class OtherError(Exception):
    pass


class Descriptions(list):
    def __init__(self, kind, ranges=()):
        super().__init__(tuple(x if isinstance(x, str) else int(x) for x in row) for row in ranges)

    def isEmpty(self):
        return not self


class FakeAgent:
    """Notes calls. Peers answer at once, and writes are done, unless a test says otherwise."""

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
    """A module of which agents are made by a function of name and configuration."""
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
