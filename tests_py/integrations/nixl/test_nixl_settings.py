# SPDX-License-Identifier: Apache-2.0
"""Finding, starting and closing NIXL's agent, with a stand-in for its package."""

import itertools
import os
import re
import sys
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.integrations import nixl
from support.integrations.peer_stand_ins import DONE, UNDER_WAY, FakeAgent, NotFoundError, put_nixl
from support.time_limits import PATIENCE

PEER = "10.0.0.2:7000/00"
STARTS = "^NixlEngine: the agent on 127.0.0.1 does not start: "


@pytest.fixture
def fake(monkeypatch):
    return put_nixl(monkeypatch)


def test_settings_hold_while_the_agent_starts(fake, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc")
    settings = {}, {"transports": "tcp,sm"}, {"transports": ""}
    engine, *_ = (nixl.NixlEngine("10.0.0.1", **each) for each in settings)
    assert [agent.transports for agent in fake] == ["tcp", "tcp,sm", "rc"]
    assert os.environ["UCX_TLS"] == "rc"
    config = fake[0].config
    assert fake[0].calls == [("UCX", {})]
    assert config["useProgThread"]
    assert config["useListenThread"]
    assert config["syncMode"] == "strict"
    assert config["pthrDelay"] > 0
    assert engine.session_id == fake[0].name
    assert re.fullmatch(rf"10.0.0.1:{config['listenPort']}/[0-9a-f]{{16}}", fake[0].name)


def test_a_port_that_was_taken_meanwhile(fake, monkeypatch):
    ports = iter([7000, 7001, 7002])
    monkeypatch.setattr(nixl, "_free_port", lambda: next(ports))
    monkeypatch.setattr(FakeAgent, "taken", {7000, 7001})
    assert nixl.NixlEngine().session_id.startswith("127.0.0.1:7002/")
    monkeypatch.setattr(nixl, "_free_port", lambda: FakeAgent.taken.add(8000) or 8000)
    with pytest.raises(RuntimeError, match=STARTS + "Failed to bind"):
        nixl.NixlEngine()
    monkeypatch.setattr(nixl, "_free_port", lambda: 9000)
    monkeypatch.setattr(FakeAgent, "createBackend", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match=STARTS + "d"):
        nixl.NixlEngine()


def test_missing_package_says_what_to_install(monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
        # If another test has loaded them, they would be found without their package.
        monkeypatch.setitem(sys.modules, f"{name}._bindings", None)
    message = r"^NixlEngine: .*pip install --no-deps nixl-cu12==1.5.1$"
    with pytest.raises(ImportError, match=message):
        nixl.NixlEngine()


def test_older_releases_are_refused(fake, monkeypatch):
    for version in ("1.5.1", "1.10"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        nixl.NixlEngine()
    monkeypatch.setattr(metadata, "version", lambda name: "1.5.0")
    with pytest.raises(ImportError, match=r"^NixlEngine: needs nixl-cu12 >= 1.5.1, got 1.5.0$"):
        nixl.NixlEngine()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"host": "localhost"}, ValueError, "host must be an IPv4 address, got 'localhost'"),
        ({"host": "::1"}, ValueError, "host must be an IPv4 address, got '::1'"),
        ({"host": 1}, TypeError, "host must be a str, got int"),
        ({"transports": None}, TypeError, "transports must be a str, got NoneType"),
        ({"recheck": 0}, TypeError, "recheck must be a bool, got int"),
    ],
)
def test_settings_that_are_refused(fake, settings, error, message):
    with pytest.raises(error, match=f"^NixlEngine: {message}$"):
        nixl.NixlEngine(**settings)
    assert fake == []


def test_peers_are_asked_before_each_write_unless_told_otherwise(fake):
    ask, block = ("ask", "10.0.0.2", 7000), [(8, 4, 0)]
    written = [("write", block, [(16, 4, 0)]), "release"]
    for recheck in (True, False):
        with nixl.NixlEngine(recheck=recheck) as engine:
            assert [engine.write(PEER, [8], [16], [4]) for _ in range(2)] == [0, 0]
            again = ["forget", ask] if recheck else []
            assert fake[-1].calls[1:] == ["forget", ask, *written, *again, *written]


def test_a_write_of_nothing_asks_nobody(fake):
    with nixl.NixlEngine() as engine:
        assert engine.write(PEER, [], [], []) == 0
        assert engine.write(PEER, [8], [16], [0]) == 0
        assert fake[0].calls[1:] == []


def test_sessions_of_another_form_are_nobodys(fake):
    with nixl.NixlEngine() as engine:
        for port in ("7000", "7000/x", "70000/0"):
            assert engine.write(f"10.0.0.2:{port}", [8], [8], [8]) == -1
        for session in ("", "nobody", "a:1/0"):
            assert engine.write(session, [8], [8], [8]) == -1
        assert not any(call[0] == "ask" for call in fake[0].calls)


def test_what_does_not_end_is_given_up(fake, monkeypatch):
    """A peer may not answer, or a write not end; calls that wait for it are given up, too."""
    monkeypatch.setattr(nixl.NixlEngine, "_min_timeout", 0.1)
    with monkeypatch.context() as patch, nixl.NixlEngine(timeout=0.1) as engine:
        patch.setattr(FakeAgent, "answers", False)
        assert engine.write(PEER, [8], [8], [8]) == -1
        assert not any(call[0] == "write" for call in fake[0].calls)
    monkeypatch.setattr(FakeAgent, "state", UNDER_WAY)
    with nixl.NixlEngine(timeout=0.1) as engine:
        assert engine.write(PEER, [8], [8], [8]) == -1
        assert fake[1].calls[-2:] == ["release", "forget"]
        writes = [engine.write_async(PEER, [8], [8], [8]) for _ in range(3)]
        assert [write.result(PATIENCE) for write in writes] == [-1, -1, -1]


def test_a_write_that_gets_its_turn_too_late_is_given_up(fake, monkeypatch):
    clock = itertools.count(0.0, 100.0)  # each look at it takes longer than the timeout
    monkeypatch.setattr(
        nixl, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep)
    )
    with nixl.NixlEngine() as engine, engine._turns.setdefault(PEER, threading.Lock()):
        assert engine.write(PEER, [8], [8], [8]) == -1


@pytest.mark.parametrize(("error", "passes"), [(NotFoundError, False), (ValueError, True)])
def test_errors_of_a_write(fake, monkeypatch, error, passes):
    """NIXL's errors of failures become -1; its errors of misuse pass through."""

    def fail(self, *arguments):
        raise error("no")

    monkeypatch.setattr(FakeAgent, "createXferReq", fail)
    with nixl.NixlEngine() as engine:
        if passes:
            with pytest.raises(error):
                engine.write(PEER, [8], [8], [8])
        else:
            assert engine.write(PEER, [8], [8], [8]) == -1
        assert fake[0].calls[-1] == "forget"


def test_ctrl_c_ends_the_wait(fake, monkeypatch):
    def interrupt(self, handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeAgent, "getXferStatus", interrupt)
    with nixl.NixlEngine() as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.write(PEER, [8], [8], [8])
        assert fake[0].calls[-2:] == ["release", "forget"]
        monkeypatch.setattr(FakeAgent, "getXferStatus", lambda *_: DONE)
        assert engine.write(PEER, [8], [8], [8]) == 0


def test_what_nixl_does_not_register_is_not_registered(fake, monkeypatch):
    memory = np.zeros(64, np.uint8)
    with nixl.NixlEngine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FakeAgent, "registerMem", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.register([memory.ctypes.data], [8])
        first = memory.ctypes.data
        assert engine.unregister([first]) == -3
        assert engine.register([first], [8]) == 0
        assert engine.register([first + 4], [8]) == -7
        assert engine.register([first + 8], [0]) == -1
