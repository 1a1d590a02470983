# SPDX-License-Identifier: Apache-2.0
"""The engine within a process registers memory, and copies blocks."""

import threading

import numpy as np
import pytest

from cpattn import _core
from cpattn.kv import MHATokenToKVPool
from cpattn.transfer import LocalEngine


@pytest.fixture
def engines():
    with LocalEngine() as sender, LocalEngine() as receiver:
        yield sender, receiver


def memory(engine, values):
    """Register new memory with these bytes; return it and its address."""
    array = np.array(values, np.uint8)
    assert engine.register([array.ctypes.data], [array.nbytes]) == 0
    return array, array.ctypes.data


def test_local_engine_writes_nothing_unless_all_is_registered(engines):
    sender, receiver = engines
    src, src_addr = memory(sender, range(100))
    dst, dst_addr = memory(receiver, 100 * [0xA5])
    for blocks in [
        ([src_addr, src_addr], [dst_addr, dst_addr + 99], [2, 2]),  # it ends beyond the target
        ([src_addr, src_addr], [dst_addr, dst_addr - 1], [2, 2]),
        ([src_addr, src_addr + 99], [dst_addr, dst_addr], [2, 2]),
        ([dst_addr], [dst_addr], [2]),  # the source is the peer's
        ([src_addr], [dst_addr], [2**64 - 1]),
    ]:
        assert sender.write(receiver.session_id, *blocks) == -1, blocks
    assert sender.write("local:0", [src_addr], [dst_addr], [1]) == -1
    assert (dst == 0xA5).all()
    assert sender.write(receiver.session_id, [src_addr], [dst_addr + 100], [0]) == 0
    assert sender.write(receiver.session_id, [src_addr], [dst_addr], [100]) == 0
    np.testing.assert_array_equal(dst, src)


def test_local_engine_codes_of_registration(engines):
    engine, _ = engines
    memory = np.zeros(6000, np.uint8)
    base = memory.ctypes.data

    def register(*ranges):
        return engine.register([base + begin for begin, _ in ranges], [size for _, size in ranges])

    def unregister(*begins):
        return engine.unregister([base + begin for begin in begins])

    assert engine.register([], []) == engine.unregister([]) == 0
    assert register((1000, 100), (2000, 100)) == 0
    assert register((1099, 1)) == -7
    assert register((3000, 100), (3050, 1)) == -7  # both are in one call
    assert register((4000, 100), (5000, 0)) == -1
    for refused in ((3000,), (4000,), (1000, 1001), (1000, 1000)):
        assert unregister(*refused) == -3  # a refused call leaves nothing
    assert register((1100, 900), (900, 100)) == 0  # it fills the gaps; 1000 is still there
    assert unregister(1000, 2000, 1100, 900) == 0
    assert register((900, 5000)) == 0


def test_local_engine_after_unregister_and_close(engines):
    sender, receiver = engines
    _, src_addr = memory(sender, range(8))
    dst, dst_addr = memory(receiver, 8 * [0xA5])
    assert receiver.unregister([dst_addr]) == 0
    assert sender.write(receiver.session_id, [src_addr], [dst_addr], [8]) == -1
    assert receiver.register([dst_addr], [8]) == 0
    receiver.close()
    receiver.close()
    assert sender.write(receiver.session_id, [src_addr], [dst_addr], [8]) == -1
    assert (dst == 0xA5).all()
    for call in (receiver.register, receiver.unregister, receiver.write):
        with pytest.raises(RuntimeError, match=r"^LocalEngine: local:\d+ is closed$"):
            call(*{"register": [[], []], "unregister": [[]]}.get(call.__name__, ["", [], [], []]))


EQUALLY = r"LocalEngine.write: src_addrs, dst_addrs and lengths must be equally long, got"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.write("", [0, 0], [0], [0]), f"{EQUALLY} 2, 1 and 1"),
        (lambda e: e.write("", [0], [0, 0], [0]), f"{EQUALLY} 1, 2 and 1"),
        (lambda e: e.write("", [0], [0], [0, 0]), f"{EQUALLY} 1, 1 and 2"),
        (lambda e: e.register([1], [1, 1]), ".*register: addrs and sizes must be equa"),
        (lambda _: LocalEngine(num_threads=0), ".*: num_threads must be >= 1, got 0$"),
        (lambda _: LocalEngine(max_blocks=0), ".*: max_blocks must be >= 1, got 0$"),
    ],
)
def test_local_engine_refuses(engines, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(engines[0])


def test_local_engine_interrupted_before_the_copy_can_be_closed(engines, monkeypatch):
    """Ctrl-C after a write is noted, but before it begins, must not leave it in flight."""
    sender, receiver = engines
    _, addr = memory(sender, range(8))

    class Interrupting(set):
        def add(self, write):
            super().add(write)
            raise KeyboardInterrupt

    monkeypatch.setattr(receiver, "_writes", Interrupting())
    assert receiver.register([addr], [8]) == 0
    with pytest.raises(KeyboardInterrupt):
        sender.write(receiver.session_id, [addr], [addr], [8])
    assert not sender._writes
    assert not receiver._writes


@pytest.mark.parametrize("end", [LocalEngine.unregister, LocalEngine.close])
@pytest.mark.parametrize("side", [0, 1], ids=["sender", "receiver"])
def test_local_engines_of_both_sides_wait_for_a_write(engines, monkeypatch, side, end):
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    class HeldBlocks(_core.Blocks):
        def copy(self, num_threads):
            begun.set()
            assert let_go.wait(60)

    monkeypatch.setattr(_core, "Blocks", HeldBlocks)
    addrs = [memory(engine, np.zeros(8))[1] for engine in engines]
    write = (engines[1].session_id, [addrs[0]], [addrs[1]], [8])
    writer = threading.Thread(target=engines[0].write, args=write)

    def end_it():
        end(engines[side], *([[addrs[side]]] if end is LocalEngine.unregister else []))
        ended.set()

    ender = threading.Thread(target=end_it)
    writer.start()
    assert begun.wait(60)
    ender.start()
    assert not ended.wait(0.05)
    let_go.set()
    writer.join()
    assert ended.wait(60)
    ender.join()


def test_more_bytes_than_a_copy_counts():
    """Every block lies within registered memory, but the sum of their lengths would wrap."""
    pool = MHATokenToKVPool(
        size=0, page_size=1, num_layers=1, num_kv_heads=2**30, head_dim=2**10, dtype="float32"
    )
    (addr, _), (size, _), _ = pool.get_contiguous_buf_infos()
    with LocalEngine() as engine:
        assert engine.register([addr], [size]) == 0
        num_blocks = 2**63 // size
        blocks = [addr] * num_blocks, [addr] * num_blocks, [size] * num_blocks
        with pytest.raises(ValueError, match=r"copy_blocks: lengths must add up to less tha"):
            engine.write(engine.session_id, *blocks)
        lists = [column * 2 for column in blocks]
        with pytest.raises(ValueError, match=r"LocalEngine.write: lengths must add up to"):
            engine.write(engine.session_id, *lists)
