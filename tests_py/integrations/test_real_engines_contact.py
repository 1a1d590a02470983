# SPDX-License-Identifier: Apache-2.0
"""Real engines and a peer that does not answer: a limit for every wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cpattn.transfer import TransferError, TransferPlan
from support.places import TESTS
from support.transfer.engines import ENGINES, Engine
from support.transfer.transfer_processes import Peer, allocate, contents, write

pytestmark = pytest.mark.slow


LIMIT = 25.0  # seconds for what has a timeout of 5; the engine by itself waits for 60
CANARY = 0xA5


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def engine(request) -> Engine:
    request.param.require()
    return request.param


@pytest.fixture(scope="module")
def receiver(engine) -> Iterator[Peer]:
    with Peer(make_engine=engine.make) as peer:
        yield peer


@pytest.fixture
def sender(engine, receiver) -> Iterator[Peer]:
    with Peer(network_of=receiver, make_engine=engine.make, timeout=5) as peer:
        peer.call(allocate, "source", 4096, 1, engine.registers_sources)
        yield peer


@pytest.fixture
def stopped(engine, receiver) -> Iterator[tuple[Peer, int]]:
    """A process that nobody has met, stopped, and the address of its memory."""
    with Peer(network_of=receiver, make_engine=engine.make) as peer:
        address = peer.call(allocate, "target", 4096, CANARY)
        peer.stop()
        try:
            yield peer, address
        finally:
            peer.resume()


def execute(state, session, address):
    """The error of executing a plan of one block, and seconds."""
    begin = time.monotonic()
    with pytest.raises(TransferError) as caught:
        TransferPlan([state.source.ctypes.data], [address], [64]).execute(state.engine, session)
    return caught.value, time.monotonic() - begin


def test_a_peer_stopped_before_it_was_met(engine, sender, receiver, stopped):
    """The peer is given up after the timeout, holds up nobody else, and can be written to later."""
    peer, address = stopped
    error, seconds = sender.call(execute, peer.session_id, address, timeout=2 * 60)
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
    time.sleep(1)  # for what might be on its way, although it was given up
    assert peer.call(contents, "target") == 4096 * b"\xa5"
    deadline = time.monotonic() + LIMIT
    while sender.call(write, peer.session_id, "source", blocks)[0]:
        assert time.monotonic() < deadline
    assert peer.call(contents, "target", 0, 65) == 64 * b"\1" + b"\xa5"


SCRIPT = """
import sys
import numpy as np
from support.transfer.engines import ENGINES
from support.transfer.transfer_processes import enter_network

name, pid, session, address = sys.argv[1:]
(make,) = (engine.make for engine in ENGINES if engine.name == name)
enter_network(int(pid))
source = np.ones(64, np.uint8)
with make(timeout=5) as engine:
    assert engine.register([source.ctypes.data], [64]) == 0
    print("code", engine.write(session, [source.ctypes.data], [int(address)], [64]), flush=True)
"""


def test_an_engine_and_its_process_end_while_a_peer_does_not_answer(engine, stopped):
    peer, address = stopped
    begin = time.monotonic()
    arguments = engine.name, str(peer.pid), peer.session_id, str(address)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [TESTS, *sys.path]))}
    options = {"capture_output": True, "text": True, "env": environment, "timeout": 2 * 60}
    run = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], **options)
    assert run.returncode == 0, run.stderr
    assert "code -1" in run.stdout
    assert time.monotonic() - begin < LIMIT + 10  # seconds to start it
