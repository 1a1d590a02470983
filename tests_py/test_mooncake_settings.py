# SPDX-License-Identifier: Apache-2.0
"""How the Mooncake engine is found, started and closed, with a stand-in for its package."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from cpattn.integrations import mooncake


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
    monkeypatch.setattr(mooncake.metadata, "version", lambda name: "0.3.13.post1")
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
    with contextlib.suppress(OSError), mooncake.MooncakeEngine() as engine:
        assert engine.register([1000, 2000, 3000], [8, 8, 8]) == 0
        FakeEngine.code = -7
        assert engine.register([4000], [8]) == -7
        assert engine.unregister([2000, 2000]) == -3
        assert engine.unregister([2000]) == 0
        engine.write("peer", (1,), (2,), (3,))
    engine.close()
    assert fake[0].calls[1:] == [
        ("register", [1000, 2000, 3000], [8, 8, 8]),
        ("register", [4000], [8]),
        ("unregister", [2000]),
        ("peer", [1], [2], [3]),
        ("unregister", [1000, 3000]),
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
    monkeypatch.setattr(mooncake.metadata, "version", lambda name: version)
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


@pytest.mark.parametrize("timeout", [4, float("nan"), float("inf")])
def test_timeout_the_engine_does_not_have(timeout):
    message = rf"MooncakeEngine: timeout must be >= 5 and finite, got {timeout}$"
    with pytest.raises(ValueError, match=message):
        mooncake.MooncakeEngine(timeout=timeout)


def test_close_waits_for_writes_of_other_threads(fake, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def write(self, *arguments):
        begun.set()
        assert go_on.wait(20)
        self.calls.append("written")
        return 0

    monkeypatch.setattr(FakeEngine, "batch_transfer_sync_write", write)
    engine = mooncake.MooncakeEngine()
    engine.register([1000], [8])
    writer = threading.Thread(target=engine.write, args=["peer", [1], [2], [3]])
    closer = threading.Thread(target=engine.close)
    writer.start()
    assert begun.wait(20)
    closer.start()
    closer.join(0.05)
    go_on.set()
    writer.join()
    closer.join()
    assert fake[0].calls[-2:] == ["written", ("unregister", [1000])]
