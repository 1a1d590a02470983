# SPDX-License-Identifier: Apache-2.0
"""The real NIXL behaves as the docstring of our module says."""

import re
import time
from collections.abc import Iterator

import pytest

from cpattn.integrations.nixl import NixlEngine
from support.transfer.engines import NIXL
from support.transfer.transfer_processes import Peer, allocate, contents, write

pytestmark = pytest.mark.slow

SIZE = 4096
CANARY = 0xA5
LARGE = 1 << 29  # more than sockets hold
LIMIT = 20.0  # seconds for a timeout of 5 on a busy machine


def settings(**more):
    return {"make_engine": NixlEngine, "timeout": 5, **more}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Peer]:
    NIXL.require()
    with Peer(**settings()) as peer:
        yield peer


@pytest.fixture(scope="module")
def sender(receiver) -> Iterator[Peer]:
    with Peer(network_of=receiver, **settings()) as peer:
        peer.call(allocate, "source", SIZE, 1)
        yield peer


@pytest.fixture(scope="module")
def trusting(receiver) -> Iterator[Peer]:
    with Peer(network_of=receiver, **settings(recheck=False)) as peer:
        peer.call(allocate, "source", SIZE, 1)
        yield peer


@pytest.fixture
def another(receiver) -> Iterator[Peer]:
    with Peer(network_of=receiver, **settings()) as peer:
        yield peer


def unregister(state, name):
    return state.engine.unregister([getattr(state, name).ctypes.data])


def test_only_senders_know_what_a_peer_has_unregistered(receiver, sender, trusting):
    address = receiver.call(allocate, "released", SIZE, CANARY)
    for peer in (sender, trusting):
        assert peer.call(write, receiver.session_id, "source", [(0, address, 64)])[0] == 0
    assert receiver.call(unregister, "released") == 0

    blocks = [(0, address + 64, 64)]
    assert sender.call(write, receiver.session_id, "source", blocks)[0] == -1
    assert receiver.call(contents, "released", 64, 128) == 64 * bytes([CANARY])
    assert trusting.call(write, receiver.session_id, "source", blocks)[0] == 0
    assert receiver.call(contents, "released", 64, 128) == 64 * b"\1"  # its docstring warns of this


def test_sources_have_to_be_registered(receiver, sender):
    address = receiver.call(allocate, "target", SIZE, CANARY)
    sender.call(allocate, "private", SIZE, 1, False)
    blocks = [(0, address, 64)]
    assert sender.call(write, receiver.session_id, "private", blocks)[0] == -1
    assert receiver.call(contents, "target") == SIZE * bytes([CANARY])
    assert receiver.call(unregister, "target") == 0


def test_an_engine_writes_to_itself(sender):
    address = sender.call(allocate, "own", SIZE, CANARY)
    assert sender.call(write, sender.session_id, "source", [(0, address, 64)])[0] == 0
    assert sender.call(contents, "own", 0, 65) == 64 * b"\1" + bytes([CANARY])
    blocks = [(0, address + SIZE, 1)]
    assert sender.call(write, sender.session_id, "source", blocks)[0] == -1
    assert sender.call(unregister, "own") == 0


def test_a_session_is_of_one_process(receiver, sender):
    """A write does not reach another process that now has its port."""
    address = receiver.call(allocate, "target", SIZE, CANARY)
    session = re.sub(r"/.*", "/0123456789abcdef", receiver.session_id)
    code, seconds = sender.call(write, session, "source", [(0, address, 64)])
    assert code == -1
    assert 4.9 < seconds < LIMIT
    assert receiver.call(contents, "target") == SIZE * bytes([CANARY])
    assert receiver.call(unregister, "target") == 0


def wait_for(state, name, position, seconds):
    deadline = time.monotonic() + seconds
    while not (there := getattr(state, name)[position]) and time.monotonic() < deadline:
        pass
    return bool(there)


def last(state, name, value=None):
    if value is not None:
        getattr(state, name)[-1] = value
    return int(getattr(state, name)[-1])


def test_a_write_that_timed_out_goes_on(receiver, another):
    """The write goes on until its engine is closed, and reads its source, registered or not."""
    address = receiver.call(allocate, "large", LARGE, 0)
    another.call(allocate, "large", LARGE, 1)
    another.start(write, receiver.session_id, "large", [(0, address, LARGE)])
    assert receiver.call(wait_for, "large", 0, LIMIT)
    receiver.stop()
    try:
        code, seconds = another.result()
        assert code == -1
        assert 4.9 < seconds < LIMIT
        assert another.call(unregister, "large") == 0
        another.call(last, "large", 2)
    finally:
        receiver.resume()
    assert receiver.call(wait_for, "large", -1, LIMIT)
    assert receiver.call(last, "large") == 2
    assert receiver.call(unregister, "large") == 0


def test_shared_memory_needs_no_doing_of_the_peer(receiver):
    """Processes of a machine share memory if both may."""
    shared = settings(recheck=False, transports="tcp,sm", network_of=receiver)
    with Peer(**shared) as target, Peer(**shared) as source:
        address = target.call(allocate, "target", 1 << 20, CANARY)
        source.call(allocate, "source", 1 << 20, 1)
        assert source.call(write, target.session_id, "source", [(0, address, 64)])[0] == 0
        target.stop()
        try:
            code, _ = source.call(write, target.session_id, "source", [(0, address, 1 << 20)])
        finally:
            target.resume()
        assert code == 0
        assert target.call(contents, "target") == (1 << 20) * b"\1"


def test_transports_that_are_not_there():
    NIXL.require()
    with pytest.raises(RuntimeError, match=r"^NixlEngine: the agent on 127.0.0.1 does not start: "):
        NixlEngine(transports="none")
