# SPDX-License-Identifier: Apache-2.0
"""Real engines write between real processes, and fail in every way as they should."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from cpattn.transfer import TransferError, TransferPlan
from support.children import path_with
from support.places import TESTS
from support.transfer.engines import ENGINES, Engine
from support.transfer.transfer_processes import Peer, allocate, contents, write

pytestmark = pytest.mark.slow

SIZE = 1 << 20
CANARY = 0xA5
LIMIT = 25.0  # seconds until a failure is reported, on a busy machine
LARGE = 1 << 31  # takes a second, and memory as it arrives
BLOCK = 1 << 26


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def engine(request) -> Engine:
    request.param.require()
    return request.param


@pytest.fixture(scope="module")
def receiver(engine) -> Iterator[Peer]:
    with Peer(make_engine=engine.make, timeout=5) as peer:
        yield peer


@pytest.fixture(scope="module")
def sender(engine, receiver) -> Iterator[Peer]:
    with Peer(network_of=receiver, make_engine=engine.make, timeout=5) as peer:
        peer.call(fill_random, "source", SIZE, engine.registers_sources)
        yield peer


@pytest.fixture
def start(engine, receiver) -> Iterator[Callable[[], Peer]]:
    with ExitStack() as peers:
        settings = {"network_of": receiver, "make_engine": engine.make, "timeout": 5}
        yield lambda: peers.enter_context(Peer(**settings))


@pytest.fixture
def another(start) -> Peer:
    return start()


@pytest.fixture
def target(receiver) -> Iterator[int]:
    """Make memory of canaries at the receiver, and release it at the end."""
    address = receiver.call(allocate, "target", SIZE, CANARY)
    yield address
    assert receiver.call(unregister, address) == 0


def fill_random(state, name, nbytes, register):
    allocate(state, name, nbytes, 0, register)
    getattr(state, name)[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def unregister(state, *addresses):
    return state.engine.unregister(addresses)


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
    pairs = enumerate(zip(pages.tolist(), lengths.tolist(), strict=True))
    blocks = [(i * 1024, target + page * 1024, n) for i, (page, n) in pairs]
    code, _ = sender.call(write, receiver.session_id, "source", blocks)
    assert code == 0
    source = sender.call(contents, "source")
    expected = bytearray([CANARY] * SIZE)
    for offset, address, n in blocks:
        expected[address - target : address - target + n] = source[offset : offset + n]
    assert receiver.call(contents, "target") == expected
    assert sender.call(write, receiver.session_id, "source", [])[0] == 0


def test_writes_to_nobody_and_to_nowhere(engine, sender, receiver, target):
    nowhere = (target - 64, target + SIZE - 63, target + SIZE, 0)
    wrong = [(receiver.session_id, address) for address in nowhere]
    wrong += [(session, target) for session in (engine.nobody, "nobody", "")]
    for session, address in wrong:
        code, seconds = sender.call(write, session, "source", [(0, address, 64)])
        assert code == -1
        assert seconds < LIMIT
    assert receiver.call(contents, "target") == bytes([CANARY]) * SIZE
    assert_next_transfer_works(sender, receiver)


def test_bad_block_fails_its_batch_only_inside_the_target(engine, sender, receiver, target):
    """Good blocks may arrive if the engine checks each block separately; nothing else arrives."""
    blocks = [(0, target, 64), (64, target + SIZE - 1, 64), (128, target + 128, 64)]
    assert sender.call(write, receiver.session_id, "source", blocks)[0] == -1
    source, memory = sender.call(contents, "source"), receiver.call(contents, "target")
    canary = bytes([CANARY])
    for begin in (0, 128):
        good = source[begin : begin + 64]
        possible = {64 * canary, good} if engine.fails_in_part else {64 * canary}
        assert memory[begin : begin + 64] in possible
    assert memory[64:128] == 64 * canary
    assert memory[192:] == canary * (SIZE - 192)


def test_unregistered_memory_is_safe(sender, receiver):
    address = receiver.call(allocate, "released", SIZE, CANARY)
    assert receiver.call(unregister, address) == 0
    assert sender.call(write, receiver.session_id, "source", [(0, address, 64)])[0] == -1
    assert receiver.call(contents, "released") == bytes([CANARY]) * SIZE
    assert_next_transfer_works(sender, receiver)


def test_codes_of_registration(sender, receiver, target):
    assert receiver.call(register, [], []) == receiver.call(unregister) == 0
    assert receiver.call(register, [target], [SIZE]) == -7
    assert receiver.call(register, [target + 8], [8]) == -7
    assert receiver.call(register, [target + SIZE], [0]) == -1
    assert receiver.call(unregister, target + 8) == -3
    # A refused call changes nothing: its ranges are not registered, and the old range still is.
    assert receiver.call(register, [target + SIZE, target], [64, 64]) == -7
    assert receiver.call(unregister, target + SIZE) == -3
    assert sender.call(write, receiver.session_id, "source", [(0, target, 64)])[0] == 0
    assert receiver.call(unregister, target, target + 1) == -3
    assert sender.call(write, receiver.session_id, "source", [(0, target, 64)])[0] == 0


def has_begun(state, name):
    buffer = getattr(state, name)
    deadline = time.monotonic() + LIMIT
    while not buffer[0]:
        assert time.monotonic() < deadline
    return True


def set_first(state, name, value):
    getattr(state, name)[0] = value


def execute(state, session, name, address, nbytes):
    """Send a buffer as one plan of several batches, and return the error and seconds."""
    blocks = range(0, nbytes, BLOCK)
    base = getattr(state, name).ctypes.data
    sources, targets = ([start + i for i in blocks] for start in (base, address))
    plan = TransferPlan(sources, targets, [min(BLOCK, nbytes)] * len(blocks))
    begin = time.monotonic()
    with pytest.raises(TransferError) as caught:
        plan.execute(state.engine, session)
    return caught.value, time.monotonic() - begin


def test_receiver_killed_in_the_middle_of_a_batch(engine, sender, receiver, another):
    """The error says how far the transfer came: some bytes have moved, most have not."""
    source = sender.call(allocate, "large", LARGE, 0, engine.registers_sources)
    sender.call(set_first, "large", 1)
    address = another.call(allocate, "large", LARGE, 0)
    sender.start(execute, another.session_id, "large", address, LARGE)
    assert another.call(has_begun, "large")
    another.kill()
    error, seconds = sender.result()
    status = error.status
    assert status == -1
    assert another.session_id in str(error)
    assert status.num_batches == 8
    assert status.first_failed_batch < 8
    assert status.bytes_done == status.first_failed_batch * (LARGE // 8) < LARGE
    assert seconds < LIMIT
    if engine.registers_sources:
        assert sender.call(unregister, source) == 0
    assert_next_transfer_works(sender, receiver)


def test_sender_killed_during_a_transfer(engine, sender, receiver, another):
    address = receiver.call(allocate, "large", LARGE + 4096, 0)
    another.call(allocate, "large", LARGE, 0, engine.registers_sources)
    another.call(set_first, "large", 1)
    another.start(write, receiver.session_id, "large", [(0, address, LARGE)])
    assert receiver.call(has_begun, "large")
    another.kill()
    assert receiver.call(contents, "large", LARGE) == bytes(4096)
    assert_next_transfer_works(sender, receiver)
    assert receiver.call(unregister, address) == 0


def test_write_to_a_frozen_receiver_ends_by_timeout(engine, sender, receiver, another):
    """A write that timed out may still be in flight, until its engine is closed."""
    address = receiver.call(allocate, "frozen", 64 * SIZE, CANARY)
    another.call(allocate, "source", 64 * SIZE, 1, engine.registers_sources)
    assert another.call(write, receiver.session_id, "source", [(0, address, 64)])[0] == 0
    receiver.stop()
    try:
        blocks = [(0, address, 64 * SIZE)]
        code, seconds = another.call(write, receiver.session_id, "source", blocks)
        assert code == -1
        assert 4.9 < seconds < LIMIT
        another.call(close, engine.session)
    finally:
        receiver.resume()
    assert_next_transfer_works(sender, receiver)
    assert receiver.call(contents, "frozen", -4096) == bytes([CANARY]) * 4096
    assert receiver.call(unregister, address) == 0


def close(state, session):
    name = type(state.engine).__name__
    state.engine.close()
    state.engine.close()  # the second call does nothing
    with pytest.raises(RuntimeError, match=rf"^{name}: {session} is closed$"):
        state.engine.write("127.0.0.1:1", [], [], [])


def test_threads_write_side_by_side(sender, receiver, target):
    codes = sender.call(write_on_threads, receiver.session_id, "source", target)
    assert codes == [0] * NUM_THREADS
    expected = sender.call(contents, "source", 0, SIZE // 2)
    assert receiver.call(contents, "target", 0, SIZE // 2) == expected


NUM_THREADS = 8


def write_on_threads(state, session, name, address):
    """Write the first half of a buffer in parts by threads; every other part by `write_async`."""
    base, size = getattr(state, name).ctypes.data, SIZE // 2 // NUM_THREADS
    parts = [([base + i * size], [address + i * size], [size]) for i in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        threads = [lambda *a: pool.submit(state.engine.write, *a), state.engine.write_async]
        waiting = [threads[i % 2](session, *part) for i, part in enumerate(parts)]
        return [write.result(LIMIT) for write in waiting]


@pytest.fixture
def stopped(another) -> Iterator[tuple[Peer, int]]:
    """Make a stopped process that no peer has met, and return it and its memory's address."""
    address = another.call(allocate, "target", 4096, CANARY)
    another.stop()
    yield another, address
    another.resume()


def test_a_peer_stopped_before_it_was_met(engine, start, receiver, stopped):
    """The peer is given up after the timeout, delays no other peer, and can be written to later."""
    sender, (peer, address) = start(), stopped
    sender.call(allocate, "source", 4096, 1, engine.registers_sources)
    error, seconds = sender.call(execute, peer.session_id, "source", address, 64, timeout=2 * 60)
    assert error.status == -1
    assert peer.session_id in str(error)
    assert 4.9 < seconds < LIMIT
    blocks = [(0, address, 64)]
    code, seconds = sender.call(write, peer.session_id, "source", blocks)
    assert code == -1
    assert seconds < (4.9 if engine.remembers_silence else LIMIT)  # less than another timeout

    own = receiver.call(allocate, "own", 4096, CANARY)
    code, seconds = sender.call(write, receiver.session_id, "source", [(0, own, 64)])
    assert code == 0
    assert seconds < LIMIT
    assert receiver.call(contents, "own", 0, 65) == 64 * b"\1" + b"\xa5"

    peer.resume()
    time.sleep(1)  # abandoned writes might still arrive
    assert peer.call(contents, "target") == 4096 * b"\xa5"
    deadline = time.monotonic() + LIMIT
    while sender.call(write, peer.session_id, "source", blocks)[0]:
        assert time.monotonic() < deadline
    assert peer.call(contents, "target", 0, 65) == 64 * b"\1" + b"\xa5"


BEGIN = """
import sys
import numpy as np
from support.transfer.engines import ENGINES
from support.transfer.transfer_processes import Peer, allocate, enter_network

(make,) = (engine.make for engine in ENGINES if engine.name == sys.argv[1])
"""
ALONE = """
pid, session, address = sys.argv[2:]
enter_network(int(pid))
source = np.ones(64, np.uint8)
with make(timeout=5) as engine:
    assert engine.register([source.ctypes.data], [64]) == 0
    print("code", engine.write(session, [source.ctypes.data], [int(address)], [64]), flush=True)
"""


def popen(engine, script, *arguments):
    command = [sys.executable, "-c", BEGIN + script, engine.name, *arguments]
    environment = os.environ | {"PYTHONPATH": path_with(TESTS)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_an_engine_and_its_process_end_while_a_peer_does_not_answer(engine, stopped):
    peer, address = stopped
    begin = time.monotonic()
    with popen(engine, ALONE, str(peer.pid), peer.session_id, str(address)) as script:
        try:
            printed, _ = script.communicate(timeout=2 * 60)
        finally:
            script.kill()
    assert (script.returncode, "code -1" in printed) == (0, True)
    assert time.monotonic() - begin < LIMIT + 10  # 10 seconds for its start


CTRL_C = """
with Peer(make_engine=make) as peer:
    address = peer.call(allocate, "target", 1 << 26, 0)
    enter_network(peer.pid)
    source = np.ones(1 << 26, np.uint8)
    with make() as engine:
        assert engine.register([source.ctypes.data], [source.nbytes]) == 0
        assert engine.write(peer.session_id, [source.ctypes.data], [address], [64]) == 0
        peer.stop()
        print("ready", flush=True)
        try:
            engine.write(peer.session_id, [source.ctypes.data], [address], [source.nbytes])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            peer.kill()  # which fails the write that `close` of some waits for
"""


def test_ctrl_c_ends_the_wait_for_a_write(engine):
    with popen(engine, CTRL_C) as script:
        try:
            assert script.stdout.readline() == "ready\n"
            time.sleep(0.3)  # wait until it writes
            begin = time.monotonic()
            script.send_signal(signal.SIGINT)
            assert script.stdout.readline() == "interrupted\n"
            assert time.monotonic() - begin < 5  # the write would take 30
            assert script.wait(20) == 0
        finally:
            script.kill()
