# SPDX-License-Identifier: Apache-2.0
"""Finding, starting and closing Mooncake's engine, with a stand-in for its package."""

import os
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.integrations import mooncake
from support.integrations.peer_stand_ins import FakeMooncake, put_mooncake
from support.time_limits import PATIENCE


@pytest.fixture
def fake(monkeypatch):
    return put_mooncake(monkeypatch)


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


def test_ranges_that_the_engine_refuses_are_not_registered(fake):
    memory = np.zeros(64, np.uint8)
    with mooncake.MooncakeEngine() as engine:
        FakeMooncake.code = -7
        assert engine.register([memory.ctypes.data], [8]) == -7
        assert engine.unregister([memory.ctypes.data]) == -3


def test_engine_that_does_not_start(fake):
    FakeMooncake.code = -2
    with pytest.raises(RuntimeError, match=r"engine on 127.0.0.1 does not start: code -2"):
        mooncake.MooncakeEngine()


def test_releases_that_report_writes_early_are_refused(fake, monkeypatch):
    for version in ("0.3.12", "0.10.0", "1.0", "0.3.11.post2", "0.2"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        if version in ("0.3.12", "0.10.0", "1.0"):
            mooncake.MooncakeEngine()
            continue
        with pytest.raises(ImportError, match=rf">= 0.3.12, which acknowledges .*, got {version}"):
            mooncake.MooncakeEngine()
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(RuntimeError, match="MC_TCP_PROTO=1 reports writes before they arrive"):
        mooncake.MooncakeEngine()


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ImportError, match=r"mooncake-transfer-engine-non-cuda.* libibverbs1"):
        mooncake.MooncakeEngine()


def test_packages_that_know_devices_judge_addresses_themselves(fake, monkeypatch):
    def version(name):
        if name.endswith("non-cuda"):
            raise metadata.PackageNotFoundError
        return "0.3.13"

    monkeypatch.setattr(metadata, "version", version)
    with mooncake.MooncakeEngine() as engine:
        assert engine.register([8], [8]) == 0


class Hanging(FakeMooncake):
    def __init__(self, method):
        super().__init__()
        self.method = method
        self.let_go = threading.Event()

    def _enter(self, method):
        self.calls.append(method)
        if method == self.method:
            assert self.let_go.wait(PATIENCE)

    def send_probe(self, session):
        self._enter("probe")
        return -102 if session == "gone" else 0

    def batch_transfer_sync_write(self, session, *blocks):
        self._enter("write")
        return 0


@pytest.fixture
def hanging(fake, monkeypatch):
    """Return a function that starts an engine with a hanging method and a limit of a second."""
    monkeypatch.setattr(mooncake.MooncakeEngine, "_min_timeout", 1)
    monkeypatch.setattr(mooncake, "_GRACE", 0)
    engines = []

    def start(method):
        engines.append(Hanging(method))
        package = SimpleNamespace(TransferEngine=engines.pop)
        monkeypatch.setitem(sys.modules, "mooncake.engine", package)
        foreign = engines[-1]
        return foreign, mooncake.MooncakeEngine(timeout=1)

    return start


def test_peers_are_asked_for_a_sign_of_life_once_and_after_failures(hanging):
    foreign, engine = hanging(None)
    blocks = [8], [8], [8]
    assert engine.write("gone", *blocks) == -1
    assert foreign.calls[1:] == ["probe"]
    assert [engine.write("peer", *blocks) for _ in range(2)] == [0, 0]
    assert foreign.calls[2:] == ["probe", "write", "write"]
    assert engine.write_async("peer", *blocks).result(PATIENCE) == 0
    foreign.batch_transfer_sync_write = lambda *_: -1
    assert engine.write("peer", *blocks) == -1
    assert engine.write("peer", *blocks) == -1
    assert foreign.calls[5:] == ["write", "probe"]
    engine.close()


@pytest.mark.parametrize("method", ["probe", "write"])
def test_a_call_that_hangs_is_given_up(hanging, method):
    """A write can hang, too, if a peer is stopped between its sign of life and the write."""
    foreign, engine = hanging(method)
    blocks = [8], [8], [8]
    assert engine.write("peer", *blocks) == -1
    calls = list(foreign.calls)
    assert engine.write("peer", *blocks) == -1
    assert foreign.calls == calls  # the engine got no further call
    assert engine.write_async("peer", *blocks).result(PATIENCE) == -1
    engine.close()
    assert not foreign.let_go.is_set()
    foreign.let_go.set()


def test_a_peer_that_answers_again_is_written_to(hanging):
    foreign, engine = hanging("probe")
    blocks = [8], [8], [8]
    assert engine.write("peer", *blocks) == -1
    foreign.let_go.set()
    while engine.write("peer", *blocks):
        pass
    assert foreign.calls.count("write") == 1  # the abandoned write is not sent later
    engine.close()
