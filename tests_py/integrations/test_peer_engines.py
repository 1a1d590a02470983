# SPDX-License-Identifier: Apache-2.0
"""Common behaviour of the engines of Mooncake and NIXL, over stand-ins for their packages."""

import contextlib
import copy
import gc
import pickle
import re
import threading

import numpy as np
import pytest

from cpattn import _core
from cpattn.kv import MHATokenToKVPool
from support.integrations.peer_stand_ins import STAND_INS, ranges_of
from support.time_limits import PATIENCE


@pytest.fixture(params=STAND_INS)
def kind(request):
    return STAND_INS[request.param]


@pytest.fixture
def fake(kind, monkeypatch):
    return kind.put(monkeypatch)


def test_settings_that_are_refused(kind, fake):
    for timeout in (kind.least - 0.5, float("nan"), float("inf"), 1e300):
        bounds = rf"timeout must be in \[{kind.least}, 1000000\], got {re.escape(str(timeout))}"
        with pytest.raises(ValueError, match=f"^{kind.name}: {bounds}$"):
            kind.make(timeout=timeout)
    for settings, error, message in (
        ({"timeout": "8"}, TypeError, "timeout must be a float, got str"),
        ({"max_blocks": 0}, ValueError, "max_blocks must be >= 1, got 0"),
        ({"max_blocks": 8.0}, TypeError, "max_blocks must be an integer, got float"),
    ):
        with pytest.raises(error, match=f"^{kind.name}: {message}$"):
            kind.make(**settings)
    assert fake == []


def test_lists_are_checked_before_the_foreign_engine_reads_them(kind, fake):
    """Mooncake itself would read beyond the end of the shorter list."""
    lists = "src_addrs, dst_addrs and lengths must be equally long, got 1, 2 and 1"
    with kind.make() as engine:
        for method, arguments, error, message in (
            ("register", ([8, 8], [8]), ValueError, "addrs and sizes must be equally many, got"),
            ("register", ([8], [8]), ValueError, "addrs .*, of which that"),
            ("write", (kind.peer, [8], [8, 8], [8]), ValueError, f"{lists}$"),
            ("write", (5, [8], [8], [8]), TypeError, "session must be a str, got int$"),
            *(
                ("write", (session, [8], [8], [8]), ValueError, "session must be printable, ")
                for session in ("127.0.0.1:5\0", "\ud800", "a\nb")
            ),
        ):
            with pytest.raises(error, match=rf"^{kind.name}\.{method}: {message}"):
                getattr(engine, method)(*arguments)
        assert len(fake[0].calls) == 1
        # At a nanosecond per byte, this takes longer than the longest possible wait of a thread.
        assert engine.write(kind.peer, [8], [8], [2**64 - 1]) == 0


def test_an_engine_stays_in_its_process(kind, fake):
    with kind.make() as engine:
        protocols = range(pickle.HIGHEST_PROTOCOL + 1)
        for move in (copy.copy, *(lambda x, p=p: pickle.dumps(x, p) for p in protocols)):
            message = f"{kind.name}: an engine cannot be pickled or copied"
            with pytest.raises(TypeError, match=message):
                move(engine)


def test_close_releases_what_is_registered_even_after_errors(kind, fake, monkeypatch):
    memory = np.zeros(64, np.uint8)
    first, second, third = (memory.ctypes.data + 16 * i for i in range(3))

    def fail(_):
        raise OSError("link down")

    kind.on_write(monkeypatch, fail)
    with contextlib.suppress(OSError), kind.make() as engine:
        assert engine.register([first, second, third], [8, 8, 8]) == 0
        assert engine.unregister([second, second]) == -3
        assert engine.unregister([second]) == 0
        engine.write(kind.peer, (1,), (2,), (3,))
    engine.close()
    assert ranges_of(fake[0].calls) == [
        ("register", [first, second, third]),
        ("unregister", [second]),
        ("unregister", [first, third]),
    ]


def test_close_waits_for_writes_of_other_threads(kind, fake, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def write(foreign):
        begun.set()
        assert go_on.wait(PATIENCE)
        foreign.calls.append(("register", ["written"]))
        return 0

    kind.on_write(monkeypatch, write)
    engine = kind.make()
    memory = np.zeros(8, np.uint8)
    assert engine.register([memory.ctypes.data], [8]) == 0
    writer = threading.Thread(target=engine.write, args=[kind.peer, [1], [2], [3]])
    closer = threading.Thread(target=engine.close)
    writer.start()
    assert begun.wait(PATIENCE)
    closer.start()
    closer.join(0.05)
    go_on.set()
    writer.join()
    closer.join()
    address = [memory.ctypes.data]
    assert ranges_of(fake[0].calls)[1:] == [("register", ["written"]), ("unregister", address)]


def test_close_does_not_wait_for_a_write_whose_thread_did_not_start(kind, fake, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    engine = kind.make()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            engine.write_async(kind.peer, [1], [2], [3])
    closer = threading.Thread(target=engine.close, daemon=True)
    closer.start()
    closer.join(PATIENCE)
    assert not closer.is_alive()


def test_a_write_cannot_be_cancelled(kind, fake, monkeypatch):
    go_on = threading.Event()
    kind.on_write(monkeypatch, lambda _: 0 if go_on.wait(PATIENCE) else -1)
    with kind.make() as engine:
        write = engine.write_async(kind.peer, [1], [2], [3])
        was_cancelled = write.cancel()
        go_on.set()
        assert not was_cancelled
        assert write.result(PATIENCE) == 0


def is_held(addr):
    return bool(_core.ranges_to_register("test", [addr], [1], False)[2][0])


def make_pool():
    sizes = {"size": 64, "page_size": 8, "num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
    pool = MHATokenToKVPool(**sizes, dtype="float32", container="numpy")
    addrs, sizes, _ = pool.get_contiguous_buf_infos()
    return pool, addrs, sizes


def test_registered_pools_are_held(kind, fake):
    engine = kind.make()
    pool, addrs, sizes = make_pool()
    assert engine.register(addrs, sizes) == 0
    del pool
    gc.collect()
    assert list(map(is_held, addrs)) == [True, True]
    assert engine.unregister(addrs[:1]) == 0
    assert list(map(is_held, addrs)) == [False, True]
    engine.close()
    assert list(map(is_held, addrs)) == [False, False]


@pytest.mark.parametrize("code", [0, -1])
def test_sources_are_held_for_as_long_as_a_write_may_read_them(kind, fake, monkeypatch, code):
    """A failed write may still be in flight, until the engine is closed."""
    pool, addrs, sizes = make_pool()
    held = []

    def write(_):
        nonlocal pool
        pool = None
        gc.collect()
        held.append(is_held(addrs[0]))
        return code

    kind.on_write(monkeypatch, write)
    engine = kind.make()
    assert engine.write(kind.peer, addrs[:1], [4096], sizes[:1]) == code
    gc.collect()
    assert held == [True]
    assert is_held(addrs[0]) == bool(code)
    engine.close()
    assert not is_held(addrs[0])
