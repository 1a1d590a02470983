# SPDX-License-Identifier: Apache-2.0
"""How the Mooncake engine is found, started and closed, with a stand-in for its package."""

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
from cpattn.integrations import mooncake
from cpattn.kv import MHATokenToKVPool

LIMIT = 20.0  # seconds for what takes one, on a busy machine; calls hang for three times as many


class FakeEngine:
    """Notes calls, and the settings it would read."""

    code = 0

    def __init__(self):
        self.calls = []

    def initialize(self, *arguments):
        self.calls.append(arguments)
        self.settings = {name: value for name, value in os.environ.items() if name[:3] == "MC_"}
        return self.code

    def get_rpc_port(self):
        return 16000

    def batch_register_memory(self, addrs, sizes):
        self.calls.append(("register", addrs, sizes))
        return self.code

    def batch_unregister_memory(self, addrs):
        self.calls.append(("unregister", sorted(addrs)))
        return 0

    def batch_transfer_sync_write(self, *arguments):
        self.calls.append(arguments)
        raise OSError("link down")


@pytest.fixture
def fake(monkeypatch):
    """The engine's package, replaced, of a release that may be changed."""
    made = []

    def make():
        made.append(FakeEngine())
        return made[-1]

    for name in [name for name in os.environ if name.startswith("MC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=make))
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.13.post1")
    monkeypatch.setattr(FakeEngine, "code", 0)
    return made


def test_settings_hold_while_the_engine_starts(fake, monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "77")
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    mooncake.MooncakeEngine("10.0.0.1", timeout=5.5)
    mooncake.MooncakeEngine(protocol="rdma", device="mlx5_0")
    tcp, rdma = fake
    assert tcp.calls == [("10.0.0.1", "P2PHANDSHAKE", "tcp", "")]
    assert tcp.settings == {"MC_TRANSFER_TIMEOUT": "6", "MC_FORCE_TCP": "1"}
    assert rdma.calls == [("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0")]
    assert rdma.settings == {"MC_TRANSFER_TIMEOUT": "30"}
    assert os.environ["MC_TRANSFER_TIMEOUT"] == "77"
    assert "MC_FORCE_TCP" not in os.environ


def test_close_releases_what_is_registered_even_after_errors(fake):
    memory = np.zeros(64, np.uint8)
    first, second, third, other = (memory.ctypes.data + 16 * i for i in range(4))
    with contextlib.suppress(OSError), mooncake.MooncakeEngine() as engine:
        assert engine.register([first, second, third], [8, 8, 8]) == 0
        FakeEngine.code = -7
        assert engine.register([other], [8]) == -7
        assert engine.unregister([second, second]) == -3
        assert engine.unregister([second]) == 0
        engine.write("peer", (1,), (2,), (3,))
    engine.close()
    assert fake[0].calls[1:] == [
        ("register", [first, second, third], [8, 8, 8]),
        ("register", [other], [8]),
        ("unregister", [second]),
        ("peer", [1], [2], [3]),
        ("unregister", [first, third]),
    ]


def test_engine_that_does_not_start(fake):
    FakeEngine.code = -2
    with pytest.raises(RuntimeError, match=r"engine on 127.0.0.1 does not start: code -2"):
        mooncake.MooncakeEngine()


@pytest.mark.parametrize(
    ("version", "good"),
    [("0.3.11.post2", False), ("0.2", False), ("0.3.12", True), ("0.10.0", True), ("1.0", True)],
)
def test_releases_that_report_writes_early_are_refused(fake, monkeypatch, version, good):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if good:
        mooncake.MooncakeEngine()
    else:
        with pytest.raises(ImportError, match=rf">= 0.3.12, which acknowledges .*, got {version}"):
            mooncake.MooncakeEngine()
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(RuntimeError, match="MC_TCP_PROTO=1 reports writes before they arrive"):
        mooncake.MooncakeEngine()


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ImportError, match=r"mooncake-transfer-engine-non-cuda.* libibverbs1"):
        mooncake.MooncakeEngine()


@pytest.mark.parametrize("timeout", [4, float("nan"), float("inf"), 1e300])
def test_timeout_the_engine_does_not_have(timeout):
    message = rf"MooncakeEngine: timeout must be in \[5, 1000000\], got {re.escape(str(timeout))}$"
    with pytest.raises(ValueError, match=message):
        mooncake.MooncakeEngine(timeout=timeout)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"timeout": "8"}, TypeError, "timeout must be a float, got str"),
        ({"max_blocks": 0}, ValueError, "max_blocks must be >= 1, got 0"),
        ({"max_blocks": 8.0}, TypeError, "max_blocks must be an integer, got float"),
    ],
)
def test_settings_that_are_refused(fake, settings, error, message):
    with pytest.raises(error, match=f"^MooncakeEngine: {message}$"):
        mooncake.MooncakeEngine(**settings)
    assert fake == []


def test_lists_are_checked_before_the_engine_reads_them(fake):
    """The engine itself would read beyond the end of the shorter list."""
    lists = "src_addrs, dst_addrs and lengths must be equally long, got 1, 2 and 1"
    with mooncake.MooncakeEngine() as engine:
        with pytest.raises(ValueError, match="register: addrs and sizes must be equally many, got"):
            engine.register([8, 8], [8])
        with pytest.raises(ValueError, match=f"^MooncakeEngine.write: {lists}$"):
            engine.write("peer", [8], [8, 8], [8])
        with pytest.raises(TypeError, match=r"^MooncakeEngine.write: session must be a str, got"):
            engine.write(5, [8], [8], [8])
        for session in ("127.0.0.1:5\0", "\ud800", "a\nb"):
            with pytest.raises(ValueError, match=r"^MooncakeEngine.write: session must be printa"):
                engine.write(session, [8], [8], [8])
        with pytest.raises(ValueError, match=r"^MooncakeEngine.register: addrs .*, of which that"):
            engine.register([8], [8])
        assert len(fake[0].calls) == 1


def test_packages_that_know_devices_judge_addresses_themselves(fake, monkeypatch):
    def version(name):
        if name.endswith("non-cuda"):
            raise metadata.PackageNotFoundError
        return "0.3.13"

    monkeypatch.setattr(metadata, "version", version)
    with mooncake.MooncakeEngine() as engine:
        assert engine.register([8], [8]) == 0


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_engine_stays_in_its_process(fake, protocol):
    with mooncake.MooncakeEngine() as engine:
        for move in (lambda: pickle.dumps(engine, protocol), lambda: copy.copy(engine)):
            with pytest.raises(TypeError, match="MooncakeEngine: an engine cannot be pickled or c"):
                move()


class Hanging(FakeEngine):
    """Does not return from a call of one of its methods until it is let go."""

    def __init__(self, method):
        super().__init__()
        self.method = method
        self.let_go = threading.Event()

    def _enter(self, method):
        self.calls.append(method)
        if method == self.method:
            assert self.let_go.wait(3 * LIMIT)

    def send_probe(self, session):
        self._enter("probe")
        return -102 if session == "gone" else 0

    def batch_transfer_sync_write(self, session, *blocks):
        self._enter("write")
        return 0


@pytest.fixture
def hanging(fake, monkeypatch):
    """Starts an engine that hangs in a method, for which a second is enough."""
    monkeypatch.setattr(mooncake, "_MIN_TIMEOUT", 1)
    monkeypatch.setattr(mooncake, "_GRACE", 0)
    engines = []

    def start(method):
        engines.append(Hanging(method))
        package = SimpleNamespace(TransferEngine=engines.pop)
        monkeypatch.setitem(sys.modules, "mooncake.engine", package)
        foreign = engines[-1]
        return foreign, mooncake.MooncakeEngine(timeout=1)

    return start


def timed(call, *arguments):
    begin = time.monotonic()
    return call(*arguments), time.monotonic() - begin


def test_peers_are_asked_for_a_sign_of_life_once_and_after_failures(hanging):
    foreign, engine = hanging(None)
    blocks = [8], [8], [8]
    assert engine.write("gone", *blocks) == -1
    assert foreign.calls[1:] == ["probe"]
    assert [engine.write("peer", *blocks) for _ in range(2)] == [0, 0]
    assert foreign.calls[2:] == ["probe", "write", "write"]
    assert engine.write_async("peer", *blocks).result(20) == 0
    foreign.batch_transfer_sync_write = lambda *_: -1
    assert engine.write("peer", *blocks) == -1
    assert engine.write("peer", *blocks) == -1
    assert foreign.calls[5:] == ["write", "probe"]
    engine.close()


@pytest.mark.parametrize("method", ["probe", "write"])
def test_a_call_that_hangs_is_given_up(hanging, method):
    """A write can hang, too: a peer may be stopped between its sign of life and the write."""
    foreign, engine = hanging(method)
    blocks = [8], [8], [8]
    code, seconds = timed(engine.write, "peer", *blocks)
    assert code == -1
    assert 1 <= seconds < LIMIT
    calls = list(foreign.calls)
    code, seconds = timed(engine.write, "peer", *blocks)
    assert code == -1
    assert seconds < LIMIT
    assert foreign.calls == calls  # the engine was not asked again
    assert engine.write_async("peer", *blocks).result(20) == -1
    _, seconds = timed(engine.close)
    assert seconds < LIMIT
    foreign.let_go.set()


def test_any_number_of_bytes_has_a_limit(hanging):
    """At a nanosecond for each, these take longer than a thread can be told to wait."""
    _, engine = hanging(None)
    assert engine.write("peer", [8], [8], [2**64 - 1]) == 0
    engine.close()


def test_a_peer_that_answers_again_is_written_to(hanging):
    foreign, engine = hanging("probe")
    blocks = [8], [8], [8]
    assert engine.write("peer", *blocks) == -1
    foreign.let_go.set()
    deadline = time.monotonic() + LIMIT
    while engine.write("peer", *blocks):
        assert time.monotonic() < deadline
    assert foreign.calls.count("write") == 1  # that which was given up has not been sent later
    engine.close()


def test_close_waits_for_writes_of_other_threads(fake, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def write(self, *arguments):
        begun.set()
        assert go_on.wait(20)
        self.calls.append("written")
        return 0

    monkeypatch.setattr(FakeEngine, "batch_transfer_sync_write", write)
    engine = mooncake.MooncakeEngine()
    memory = np.zeros(8, np.uint8)
    assert engine.register([memory.ctypes.data], [8]) == 0
    writer = threading.Thread(target=engine.write, args=["peer", [1], [2], [3]])
    closer = threading.Thread(target=engine.close)
    writer.start()
    assert begun.wait(20)
    closer.start()
    closer.join(0.05)
    go_on.set()
    writer.join()
    closer.join()
    assert fake[0].calls[-2:] == ["written", ("unregister", [memory.ctypes.data])]


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
    engine = mooncake.MooncakeEngine()
    pool, addrs, sizes = make_pool()
    assert engine.register(addrs, sizes) == 0
    del pool
    gc.collect()
    assert [is_held(addr) for addr in addrs] == [True, True]
    assert engine.unregister(addrs[:1]) == 0
    assert [is_held(addr) for addr in addrs] == [False, True]
    engine.close()
    assert [is_held(addr) for addr in addrs] == [False, False]


@pytest.mark.parametrize("code", [0, -1])
def test_sources_are_held_for_as_long_as_a_write_may_read_them(fake, monkeypatch, code):
    """One that failed may still be in flight: until the engine is closed."""
    pool, addrs, sizes = make_pool()
    held = []

    def write(self, *arguments):
        nonlocal pool
        pool = None
        gc.collect()
        held.append(is_held(addrs[0]))
        return code

    monkeypatch.setattr(FakeEngine, "batch_transfer_sync_write", write)
    engine = mooncake.MooncakeEngine()
    assert engine.write("peer", addrs[:1], [4096], sizes[:1]) == code
    gc.collect()
    assert held == [True]
    assert is_held(addrs[0]) == bool(code)
    engine.close()
    assert not is_held(addrs[0])
