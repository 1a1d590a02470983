# SPDX-License-Identifier: Apache-2.0
"""How NIXL's agent is found, started and closed, with a stand-in for its package."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import re
import sys
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn import _core
from cpattn.integrations import nixl
from cpattn.kv import MHATokenToKVPool
from support.transfer.nixl_stand_in import (
    DONE,
    FAILED,
    UNDER_WAY,
    FakeAgent,
    NotFoundError,
    bindings,
)

PEER = "10.0.0.2:7000/00"
LIMIT = 20.0  # seconds for what takes one, on a busy machine


@pytest.fixture
def fake(monkeypatch):
    """NIXL's package, replaced, of a release that may be changed; the agents that were made."""
    made = []

    def make(name, config):
        made.append(FakeAgent(name, config))
        return made[-1]

    monkeypatch.setitem(sys.modules, "nixl_cu12", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", bindings(make))
    monkeypatch.setattr(metadata, "version", lambda name: "1.5.1")
    for name in ("answers", "state", "taken"):
        monkeypatch.setattr(FakeAgent, name, copy.copy(getattr(FakeAgent, name)))
    return made


def test_settings_hold_while_the_agent_starts(fake, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc")
    for settings in ({}, {"transports": "tcp,sm"}, {"transports": ""}):
        nixl.NixlEngine("10.0.0.1", **settings)
    assert [agent.transports for agent in fake] == ["tcp", "tcp,sm", "rc"]
    assert os.environ["UCX_TLS"] == "rc"
    config = fake[0].config
    assert fake[0].calls == [("UCX", {})]
    assert config["useProgThread"]
    assert config["useListenThread"]
    assert config["syncMode"] == "strict"
    assert config["pthrDelay"] > 0


def test_the_session_says_where_the_listener_is(fake):
    engine = nixl.NixlEngine("10.0.0.1")
    (agent,) = fake
    assert engine.session_id == agent.name
    assert re.fullmatch(rf"10.0.0.1:{agent.config['listenPort']}/[0-9a-f]{{16}}", agent.name)


def test_a_port_that_was_taken_meanwhile(fake, monkeypatch):
    ports = iter([7000, 7001, 7002])
    monkeypatch.setattr(nixl, "_free_port", lambda: next(ports))
    monkeypatch.setattr(FakeAgent, "taken", {7000, 7001})
    assert nixl.NixlEngine().session_id.startswith("127.0.0.1:7002/")
    monkeypatch.setattr(nixl, "_free_port", lambda: FakeAgent.taken.add(8000) or 8000)
    with pytest.raises(
        RuntimeError, match=r"the agent on 127.0.0.1 does not start: Failed to bind"
    ):
        nixl.NixlEngine()


def test_an_agent_that_does_not_start(fake, monkeypatch):
    monkeypatch.setattr(FakeAgent, "createBackend", lambda *_: 1 / 0)
    with pytest.raises(
        RuntimeError, match=r"^NixlEngine: the agent on 127.0.0.1 does not start: d"
    ):
        nixl.NixlEngine()
    assert len(fake) == 1


def test_missing_package_says_what_to_install(monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
        # Where another test has loaded them, they would be found without their package.
        monkeypatch.setitem(sys.modules, f"{name}._bindings", None)
    with pytest.raises(
        ImportError, match=r"^NixlEngine: .*pip install --no-deps nixl-cu12==1.5.1$"
    ):
        nixl.NixlEngine()


@pytest.mark.parametrize(("version", "good"), [("1.5.0", False), ("1.5.1", True), ("1.10", True)])
def test_older_releases_are_refused(fake, monkeypatch, version, good):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if good:
        nixl.NixlEngine()
    else:
        with pytest.raises(
            ImportError, match=rf"^NixlEngine: needs nixl-cu12 >= 1.5.1, got {version}$"
        ):
            nixl.NixlEngine()


@pytest.mark.parametrize("timeout", [0.5, float("nan"), float("inf"), 1e300])
def test_timeouts_that_are_refused(timeout):
    message = rf"NixlEngine: timeout must be in \[1, 1000000\], got {re.escape(str(timeout))}$"
    with pytest.raises(ValueError, match=message):
        nixl.NixlEngine(timeout=timeout)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"timeout": "8"}, TypeError, "timeout must be a float, got str"),
        ({"max_blocks": 0}, ValueError, "max_blocks must be >= 1, got 0"),
        ({"max_blocks": 8.0}, TypeError, "max_blocks must be an integer, got float"),
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


def test_lists_are_checked_before_nixl_reads_them(fake):
    lists = "src_addrs, dst_addrs and lengths must be equally long, got 1, 2 and 1"
    with nixl.NixlEngine() as engine:
        with pytest.raises(ValueError, match="register: addrs and sizes must be equally many, got"):
            engine.register([8, 8], [8])
        with pytest.raises(ValueError, match=f"^NixlEngine.write: {lists}$"):
            engine.write(PEER, [8], [8, 8], [8])
        with pytest.raises(TypeError, match=r"^NixlEngine.write: session must be a str, got int$"):
            engine.write(5, [8], [8], [8])
        for session in ("127.0.0.1:5\0", "\ud800", "a\nb"):
            with pytest.raises(ValueError, match=r"^NixlEngine.write: session must be printable, "):
                engine.write(session, [8], [8], [8])
        with pytest.raises(ValueError, match=r"^NixlEngine.register: addrs .*, of which that"):
            engine.register([8], [8])
        assert fake[0].calls == [("UCX", {})]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_engine_stays_in_its_process(fake, protocol):
    with nixl.NixlEngine() as engine:
        for move in (lambda: pickle.dumps(engine, protocol), lambda: copy.copy(engine)):
            with pytest.raises(
                TypeError, match="NixlEngine: an engine cannot be pickled or copied"
            ):
                move()


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


@pytest.mark.parametrize(
    "session", ["", "nobody", "10.0.0.2:7000", "10.0.0.2:7000/x", "10.0.0.2:70000/0", "a:1/0"]
)
def test_sessions_of_another_form_are_nobodys(fake, session):
    with nixl.NixlEngine() as engine:
        assert engine.write(session, [8], [8], [8]) == -1
        assert not any(call[0] == "ask" for call in fake[0].calls)


def timed(call, *arguments):
    begin = time.monotonic()
    return call(*arguments), time.monotonic() - begin


def test_a_peer_that_does_not_answer_is_given_up(fake, monkeypatch):
    monkeypatch.setattr(FakeAgent, "answers", False)
    with nixl.NixlEngine(timeout=1) as engine:
        code, seconds = timed(engine.write, PEER, [8], [8], [8])
        assert code == -1
        assert 1 <= seconds < LIMIT
        assert not any(call[0] == "write" for call in fake[0].calls)


def test_a_write_that_does_not_end_is_given_up(fake, monkeypatch):
    monkeypatch.setattr(FakeAgent, "state", UNDER_WAY)
    with nixl.NixlEngine(timeout=1) as engine:
        code, seconds = timed(engine.write, PEER, [8], [8], [8])
        assert code == -1
        assert 1 <= seconds < LIMIT
        assert fake[0].calls[-2:] == ["release", "forget"]


def test_writes_to_a_peer_take_turns_and_wait_no_longer_than_their_timeout(fake, monkeypatch):
    monkeypatch.setattr(FakeAgent, "state", UNDER_WAY)
    with nixl.NixlEngine(timeout=1) as engine:
        begin = time.monotonic()
        writes = [engine.write_async(PEER, [8], [8], [8]) for _ in range(3)]
        assert [write.result(LIMIT) for write in writes] == [-1, -1, -1]
        assert time.monotonic() - begin < LIMIT


def test_any_number_of_bytes_has_a_limit(fake):
    """At a nanosecond for each, these take longer than a thread can be told to wait."""
    with nixl.NixlEngine() as engine:
        assert engine.write(PEER, [8], [8], [2**64 - 1]) == 0


@pytest.mark.parametrize(("error", "passes"), [(NotFoundError, False), (ValueError, True)])
def test_errors_of_a_write(fake, monkeypatch, error, passes):
    """NIXL has errors for what can go wrong, which is -1, and for misuse, which passes through."""

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


def test_close_releases_what_is_registered_even_after_errors(fake, monkeypatch):
    memory = np.zeros(64, np.uint8)
    first, second, third = (memory.ctypes.data + 16 * i for i in range(3))

    def fail(*_):
        raise OSError("link down")

    monkeypatch.setattr(FakeAgent, "postXferReq", fail)
    with contextlib.suppress(OSError), nixl.NixlEngine() as engine:
        assert engine.register([first, second, third], [8, 8, 8]) == 0
        assert engine.register([first + 4], [8]) == -7
        assert engine.register([first + 8], [0]) == -1
        assert engine.unregister([second, second]) == -3
        assert engine.unregister([second]) == 0
        engine.write(PEER, (1,), (2,), (3,))
    engine.close()
    kept = [call for call in fake[0].calls if "register" in call[0]]
    assert kept == [
        ("register", [(first, 8, 0, ""), (second, 8, 0, ""), (third, 8, 0, "")]),
        ("deregister", [(second, 8, 0, "")]),
        ("deregister", [(first, 8, 0, ""), (third, 8, 0, "")]),
    ]


def test_what_nixl_does_not_register_is_not_registered(fake, monkeypatch):
    memory = np.zeros(64, np.uint8)
    with nixl.NixlEngine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FakeAgent, "registerMem", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.register([memory.ctypes.data], [8])
        assert engine.unregister([memory.ctypes.data]) == -3
        assert engine.register([memory.ctypes.data], [8]) == 0


def test_close_waits_for_writes_of_other_threads(fake, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def status(self, handle):
        begun.set()
        assert go_on.wait(LIMIT)
        self.calls.append("written")
        return DONE

    monkeypatch.setattr(FakeAgent, "getXferStatus", status)
    engine = nixl.NixlEngine()
    memory = np.zeros(8, np.uint8)
    assert engine.register([memory.ctypes.data], [8]) == 0
    writer = threading.Thread(target=engine.write, args=[PEER, [1], [2], [3]])
    closer = threading.Thread(target=engine.close)
    writer.start()
    assert begun.wait(LIMIT)
    closer.start()
    closer.join(0.05)
    go_on.set()
    writer.join()
    closer.join()
    ranges = [(memory.ctypes.data, 8, 0, "")]
    assert fake[0].calls[-3:] == ["written", "release", ("deregister", ranges)]


def is_held(addr):
    """Whether memory of a pool is still there."""
    return bool(_core.ranges_to_register("test", [addr], [1], False)[2][0])


def make_pool():
    pool = MHATokenToKVPool(
        size=64,
        page_size=8,
        num_layers=1,
        num_kv_heads=2,
        head_dim=8,
        dtype="float32",
        container="numpy",
    )
    addrs, sizes, _ = pool.get_contiguous_buf_infos()
    return pool, addrs, sizes


def test_registered_pools_are_held(fake):
    engine = nixl.NixlEngine()
    pool, addrs, sizes = make_pool()
    assert engine.register(addrs, sizes) == 0
    del pool
    gc.collect()
    assert [is_held(addr) for addr in addrs] == [True, True]
    assert engine.unregister(addrs[:1]) == 0
    assert [is_held(addr) for addr in addrs] == [False, True]
    engine.close()
    assert [is_held(addr) for addr in addrs] == [False, False]


@pytest.mark.parametrize(("state", "code"), [(DONE, 0), (FAILED, -1)])
def test_sources_are_held_for_as_long_as_a_write_may_read_them(fake, monkeypatch, state, code):
    """One that failed may still be in flight: until the engine is closed."""
    pool, addrs, sizes = make_pool()
    held = []

    def status(self, handle):
        nonlocal pool
        pool = None
        gc.collect()
        held.append(is_held(addrs[0]))
        return state

    monkeypatch.setattr(FakeAgent, "getXferStatus", status)
    engine = nixl.NixlEngine()
    assert engine.write(PEER, addrs[:1], [4096], sizes[:1]) == code
    gc.collect()
    assert held == [True]
    assert is_held(addrs[0]) == bool(code)
    engine.close()
    assert not is_held(addrs[0])
