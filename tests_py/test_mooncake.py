# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake engine between two real processes: what works, and every way to fail."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.integrations import mooncake
from interrupts import assert_interruptible
from transfer_processes import Peer, allocate, contents, requires_mooncake, write

SIZE = 1 << 20
CANARY = 0xA5
LIMIT = 20.0  # seconds within which a failure is reported, on a busy machine
LARGE = 1 << 31  # takes a second, and memory as it arrives


@pytest.fixture(scope="module")
def receiver() -> Iterator[Peer]:
    requires_mooncake()
    with Peer(timeout=5) as peer:
        yield peer


@pytest.fixture(scope="module")
def sender(receiver) -> Iterator[Peer]:
    with Peer(network_of=receiver, timeout=5) as peer:
        peer.call(fill_random, "source", SIZE)
        yield peer


@pytest.fixture
def target(receiver) -> Iterator[int]:
    """Canaries at the receiver; at the end the memory is released."""
    address = receiver.call(allocate, "target", SIZE, CANARY)
    yield address
    assert receiver.call(unregister, address) == 0


def fill_random(state, name, nbytes):
    setattr(state, name, np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))


def unregister(state, address):
    return state.engine.unregister([address])


def register(state, addresses, sizes):
    return state.engine.register(addresses, sizes)


def assert_next_transfer_works(sender: Peer, receiver: Peer) -> None:
    address = receiver.call(allocate, "next", 4096, CANARY)
    code, _ = sender.call(write, receiver.session_id, "source", [(5, address + 7, 4000)])
    assert code == 0
    expected = sender.call(contents, "source", 5, 4005)
    assert receiver.call(contents, "next") == 7 * b"\xa5" + expected + 89 * b"\xa5"
    assert receiver.call(unregister, address) == 0


def test_scattered_blocks_arrive_and_canaries_survive(sender, receiver, target):
    random = np.random.default_rng(1)
    pages = random.permutation(SIZE // 1024)[:300]
    lengths = random.integers(1, 1025, 300)
    blocks = [
        (int(i) * 1024, target + int(page) * 1024, int(n))
        for i, (page, n) in enumerate(zip(pages, lengths, strict=True))
    ]
    code, _ = sender.call(write, receiver.session_id, "source", blocks)
    assert code == 0
    source = sender.call(contents, "source")
    expected = bytearray([CANARY] * SIZE)
    for offset, address, n in blocks:
        expected[address - target : address - target + n] = source[offset : offset + n]
    assert receiver.call(contents, "target") == expected


def test_empty_write_succeeds(sender, receiver):
    assert sender.call(write, receiver.session_id, "source", [])[0] == 0


@pytest.mark.parametrize("outside", ["before", "end", "behind", "null"])
def test_target_outside_what_is_registered(sender, receiver, target, outside):
    address = {
        "before": target - 64,
        "end": target + SIZE - 63,
        "behind": target + SIZE,
        "null": 0,
    }[outside]
    code, seconds = sender.call(write, receiver.session_id, "source", [(0, address, 64)])
    assert code == -1
    assert seconds < LIMIT
    assert receiver.call(contents, "target") == bytes([CANARY]) * SIZE
    assert_next_transfer_works(sender, receiver)


def test_bad_block_fails_its_batch_only_inside_the_target(sender, receiver, target):
    """The good blocks are there or not; nothing else is."""
    blocks = [(0, target, 64), (64, target + SIZE - 1, 64), (128, target + 128, 64)]
    assert sender.call(write, receiver.session_id, "source", blocks)[0] == -1
    source, memory = sender.call(contents, "source"), receiver.call(contents, "target")
    canary = bytes([CANARY])
    assert memory[:64] in {64 * canary, source[:64]}
    assert memory[128:192] in {64 * canary, source[128:192]}
    assert memory[64:128] == 64 * canary
    assert memory[192:] == canary * (SIZE - 192)


def test_unregistered_memory_is_safe(sender, receiver):
    address = receiver.call(allocate, "released", SIZE, CANARY)
    assert receiver.call(unregister, address) == 0
    assert sender.call(write, receiver.session_id, "source", [(0, address, 64)])[0] == -1
    assert receiver.call(contents, "released") == bytes([CANARY]) * SIZE
    assert_next_transfer_works(sender, receiver)


def test_codes_of_registration(sender, receiver, target):
    assert receiver.call(register, [target], [SIZE]) == -7
    assert receiver.call(register, [target + 8], [8]) == -7
    assert receiver.call(register, [target + SIZE], [0]) == -1
    assert receiver.call(unregister, target + 8) == -3
    # A refused call changes nothing: neither of its ranges is registered, and the old one still is.
    assert receiver.call(register, [target + SIZE, target], [64, 64]) == -7
    assert receiver.call(unregister, target + SIZE) == -3
    assert sender.call(write, receiver.session_id, "source", [(0, target, 64)])[0] == 0


def unregister_known_and_unknown(state, address):
    return state.engine.unregister([address, address + 1])


def test_unregister_is_all_or_nothing(sender, receiver, target):
    assert receiver.call(unregister_known_and_unknown, target) == -3
    assert sender.call(write, receiver.session_id, "source", [(0, target, 64)])[0] == 0


@pytest.mark.parametrize("session", ["127.0.0.1:1", "nobody", ""])
def test_wrong_address(sender, receiver, target, session):
    code, seconds = sender.call(write, session, "source", [(0, target, 64)])
    assert code == -1
    assert seconds < LIMIT
    assert receiver.call(contents, "target") == bytes([CANARY]) * SIZE
    assert_next_transfer_works(sender, receiver)


def test_killed_receiver(sender, receiver):
    with Peer(network_of=receiver) as other:
        address = other.call(allocate, "target", SIZE, CANARY)
        assert sender.call(write, other.session_id, "source", [(0, address, SIZE)])[0] == 0
        other.kill()
        code, seconds = sender.call(write, other.session_id, "source", [(0, address, SIZE)])
    assert code == -1
    assert seconds < LIMIT
    assert_next_transfer_works(sender, receiver)


def allocate_sparse(state, name, nbytes, register):
    """Zeros that take no memory before they are written."""
    buffer = np.zeros(nbytes, np.uint8)
    setattr(state, name, buffer)
    if register:
        assert state.engine.register([buffer.ctypes.data], [nbytes]) == 0
    return buffer.ctypes.data


def has_begun(state, name):
    """Wait for the first byte of a write."""
    buffer = getattr(state, name)
    deadline = time.monotonic() + LIMIT
    while not buffer[0]:
        assert time.monotonic() < deadline
    return True


def set_first(state, name, value):
    getattr(state, name)[0] = value


def test_receiver_killed_during_a_transfer(sender, receiver):
    sender.call(allocate_sparse, "large", LARGE, False)
    sender.call(set_first, "large", 1)
    with Peer(network_of=receiver) as other:
        address = other.call(allocate_sparse, "large", LARGE, True)
        sender.start(write, other.session_id, "large", [(0, address, LARGE)])
        assert other.call(has_begun, "large")
        other.kill()
        code, seconds = sender.result()
    assert code == -1
    assert seconds < LIMIT
    assert_next_transfer_works(sender, receiver)


def test_sender_killed_during_a_transfer(sender, receiver):
    address = receiver.call(allocate_sparse, "large", LARGE + 4096, True)
    with Peer(network_of=receiver) as other:
        other.call(allocate_sparse, "large", LARGE, False)
        other.call(set_first, "large", 1)
        other.start(write, receiver.session_id, "large", [(0, address, LARGE)])
        assert receiver.call(has_begun, "large")
        other.kill()
    assert receiver.call(contents, "large", LARGE) == bytes(4096)
    assert_next_transfer_works(sender, receiver)
    assert receiver.call(unregister, address) == 0


def test_write_to_a_frozen_receiver_ends_by_timeout_and_with_its_engine(sender, receiver):
    """A write that timed out is still in flight, until its engine is closed."""
    address = receiver.call(allocate, "frozen", 64 * SIZE, CANARY)
    with Peer(network_of=receiver, timeout=5) as other:
        other.call(allocate, "source", 64 * SIZE, 1, False)
        assert other.call(write, receiver.session_id, "source", [(0, address, 64)])[0] == 0
        receiver.stop()
        try:
            blocks = [(0, address, 64 * SIZE)]
            code, seconds = other.call(write, receiver.session_id, "source", blocks)
            assert code == -1
            assert 4.9 < seconds < LIMIT
            other.call(close)
        finally:
            receiver.resume()
        assert_next_transfer_works(sender, receiver)
        assert receiver.call(contents, "frozen", -4096) == bytes([CANARY]) * 4096
    assert receiver.call(unregister, address) == 0


def close(state):
    state.engine.close()
    state.engine.close()  # the second one does nothing
    with pytest.raises(RuntimeError, match=r"MooncakeEngine: 127.0.0.1:\d+ is closed"):
        state.engine.write("127.0.0.1:1", [], [], [])


def test_write_to_a_closed_engine(sender, receiver):
    with Peer(network_of=receiver) as other:
        address = other.call(allocate, "target", SIZE, CANARY)
        assert sender.call(write, other.session_id, "source", [(0, address, 64)])[0] == 0
        other.call(close)
        code, seconds = sender.call(write, other.session_id, "source", [(0, address, SIZE)])
        assert code == -1
        assert seconds < LIMIT
        assert other.call(contents, "target", 64) == bytes([CANARY]) * (SIZE - 64)


def test_ctrl_c_ends_a_write_that_hangs():
    """Nothing of the script waits for the peer once it is killed, nor for the timeout."""
    requires_mooncake()
    assert_interruptible(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from cpattn.integrations.mooncake import MooncakeEngine
from interrupts import assert_interruptible
from transfer_processes import Peer, allocate, enter_network
with Peer() as peer:
    address = peer.call(allocate, "target", 1 << 26, 0)
    enter_network(peer.pid)
    source = np.ones(1 << 26, np.uint8)
    with MooncakeEngine() as engine:
        assert engine.write(peer.session_id, [source.ctypes.data], [address], [64]) == 0
        peer.stop()
        print("ready", flush=True)
        try:
            engine.write(peer.session_id, [source.ctypes.data], [address], [source.nbytes])
        finally:
            peer.kill()
""")


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


def test_timeout_below_the_engines_floor():
    with pytest.raises(ValueError, match=r"MooncakeEngine: timeout must be >= 5, got 4"):
        mooncake.MooncakeEngine(timeout=4)
