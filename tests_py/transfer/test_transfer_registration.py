# SPDX-License-Identifier: Apache-2.0
"""Registered memory is whole or refused, and held as long; lists of buffers give its regions."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn.kv import MHATokenToKVPool
from cpattn.transfer import (
    KVLayout,
    LocalEngine,
    TransferError,
    plan_kv_transfer,
    register,
    registration_regions,
)

MiB = 1 << 20


def make_pool(**changes):
    sizes = {"size": 64, "page_size": 8, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
    return MHATokenToKVPool(**(sizes | changes), dtype="float32", container="numpy")


def is_mapped(addr):
    """Return whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= addr < end:
            return True
    return False


@pytest.fixture
def engine():
    with LocalEngine() as engine:
        yield engine


class ForeignEngine:
    """An engine of somebody else that answers with codes, and notes the calls."""

    session_id, max_blocks = "foreign", 8

    def __init__(self, *codes):
        self.codes, self.calls = list(codes), []

    def _answer(self, *call):
        self.calls.append(call)
        return self.codes.pop(0) if self.codes else 0

    def register(self, addrs, sizes):
        return self._answer("register", addrs, sizes)

    def unregister(self, addrs):
        return self._answer("unregister", addrs)


def test_pools_layouts_and_tensors_are_registered_once(engine):
    pool, array, tensor = make_pool(), np.zeros((3, 5), np.int16), torch.zeros(4, 7)
    addrs, sizes, _ = pool.get_contiguous_buf_infos()
    layout = KVLayout.from_pool(pool)
    with register(engine, pool, layout, array, tensor, np.empty((0, 3))) as registration:
        assert registration.engine is engine
        assert registration.addrs == (*addrs, array.ctypes.data, tensor.data_ptr())
        assert registration.sizes == (*sizes, 30, 112)
        assert repr(registration) == "Registration(6 ranges, 18574 bytes)"
        assert engine.register(addrs[:1], [1]) == -7
    assert engine.register(addrs, sizes) == 0


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (np.zeros((4, 4))[:, :2], ValueError, r"an array must be contiguous, got shape \[4, 2\]"),
        (np.frombuffer(b"bytes", np.uint8), ValueError, "an array must be writeable, got a read"),
        (np.ma.masked_array([1, 2], [True, False]), TypeError, "every argument must be .*Masked"),
        (memoryview(bytearray(8)), TypeError, "every argument must be .*, got memoryview"),
        ([np.zeros(4)], TypeError, "every argument must be .*, got list"),
        (4096, TypeError, "every argument must be .*, got int"),
        (torch.zeros(4, 4).T[:2], ValueError, "a tensor must be contiguous, got one"),
        (torch.zeros(4, 4).to_sparse(), ValueError, "a tensor must be contiguous, got one"),
    ],
)
def test_what_cannot_be_registered(what, error, message):
    foreign = ForeignEngine()
    with pytest.raises(error, match=f"^register: {message}"):
        register(foreign, np.zeros(4), what)
    assert foreign.calls == []


def test_codes_of_registration_are_errors():
    array = np.zeros(8)
    with pytest.raises(TransferError, match=r"refused 1 range, 64 bytes with code -7$") as caught:
        register(ForeignEngine(-7), array)
    assert caught.value.status == -7
    foreign = ForeignEngine(0, -3)
    registration = register(foreign, array)
    with pytest.raises(TransferError, match=r"refused to give back .* with code -3$") as caught:
        registration.close()
    assert caught.value.status == -3
    registration.close()  # it asks again
    registration.close()
    assert [call[0] for call in foreign.calls] == ["register", "unregister", "unregister"]
    assert register(foreign, np.empty(0)).addrs == ()
    assert len(foreign.calls) == 3  # no memory, no call
    for answer in (None, False, 0.0):
        message = f"register must return an integer code, .*got {type(answer).__name__}$"
        with pytest.raises(TypeError, match=message):
            register(ForeignEngine(answer), array)
    watched = weakref.ref(array)
    del array, caught, registration, foreign
    gc.collect()
    assert watched() is None  # refused memory is not held


# atexit calls last the function that was registered first.
AT_EXIT = """
import atexit, weakref
atexit.register(lambda: print("held" if watched() is not None else "gone"))
import numpy as np, cpattn

class Engine:
    session_id, max_blocks = "foreign", 8
    register = unregister = lambda *_: 0

engine, array = Engine(), np.zeros(8)
watched = weakref.ref(array)
cpattn.transfer.register(engine, array)
del array
"""


def test_memory_is_held_while_the_process_ends(children):
    """An engine that lives in foreign code may write until the very end."""
    assert children.run([sys.executable, "-c", AT_EXIT]).stdout == "held\n"


def test_a_registration_stays_in_its_process(engine):
    registration = register(engine, np.zeros(8))
    for move in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^Registration: memory of this process cannot be"):
            move(registration)


def test_ranges_that_are_no_memory_are_refused(engine, tmp_path):
    array = np.zeros(64, np.uint8)
    addr = array.ctypes.data
    (tmp_path / "file").write_bytes(bytes(4096))
    read_only = np.memmap(tmp_path / "file", np.uint8, "r")
    cases = [
        ([0], [100], "100 bytes at 0 at index 0, of which that at 0 is not"),
        ([addr], [10**12], f"1000000000000 bytes at {addr} at index 0, of which that at "),
        ([addr, 2**60], [8, 8], f"8 bytes at {2**60} at index 1, of which that at {2**60} is not"),
        ([read_only.ctypes.data], [8], f"of which that at {read_only.ctypes.data} is not"),
    ]
    for addrs, sizes, message in cases:
        rule = "addrs and sizes must be memory that this process can read and write, got"
        with pytest.raises(ValueError, match=f"^LocalEngine.register: {rule} .*{message}"):
            engine.register(addrs, sizes)
    with pytest.raises(ValueError, match=r"^LocalEngine.register: addrs \+ sizes must not pass"):
        engine.register([2**64 - 1], [2])
    assert engine.register([addr], [64]) == 0  # a refused call leaves nothing


def addresses(pool):
    return pool.get_contiguous_buf_infos()[:2]


def test_a_range_within_a_pool_holds_it_and_each_range_its_own(engine):
    pools = [make_pool() for _ in range(4)]
    addrs = [addresses(pool)[0][1] + 12 for pool in pools]
    assert engine.register(addrs[:3], [8] * 3) == 0
    register(engine, pools[3])
    pools.clear()
    gc.collect()
    assert all(map(is_mapped, addrs))
    assert engine.unregister(addrs[:1]) == 0
    assert [is_mapped(addr) for addr in addrs] == [False, True, True, True]
    assert engine.unregister(addrs[1:2]) == 0
    engine.close()
    gc.collect()
    assert not any(map(is_mapped, addrs))


def test_a_layout_keeps_its_pools():
    pool, draft = make_pool(), make_pool(num_layers=1)
    layout = KVLayout.from_pool(pool, draft)
    addrs = [entry.addr for entry in layout.entries]
    to = KVLayout(layout.entries, 8, total_kv_heads=2)
    plan = plan_kv_transfer(layout, to, [1], [2])
    (link,) = cpattn.transfer.plan_kv_links([layout], [to], [[1]], [[2]])
    copies = [copy.copy(layout), copy.deepcopy(layout), copy.deepcopy(plan), link.plan]
    assert copies[0] == copies[1] == layout
    del pool, draft, layout, plan, link
    while copies:
        gc.collect()
        assert all(is_mapped(addr) for addr in addrs)
        copies.pop(0)
    gc.collect()
    assert not any(is_mapped(addr) for addr in addrs)


def test_tensors_are_held_until_the_end_of_the_registration_or_the_engine():
    arrays = [np.zeros(8) for _ in range(3)]
    watched = [weakref.ref(array) for array in arrays]
    foreign = ForeignEngine()
    registration = register(foreign, arrays[0])
    register(foreign, arrays[1])  # nobody keeps this registration
    local = LocalEngine()
    register(local, arrays[2])
    arrays.clear()
    gc.collect()
    assert all(array() is not None for array in watched)
    registration.close()
    local.close()
    gc.collect()
    assert [array() is not None for array in watched] == [False, True, False]
    del foreign, registration
    gc.collect()
    assert watched[1]() is None


def test_registrations_end_once_whoever_ends_them(engine):
    array = np.zeros(8)
    registration = register(engine, array)
    threads = [threading.Thread(target=registration.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.register([array.ctypes.data], [64]) == 0
    registration.close()  # it does not end the new one
    assert engine.unregister([array.ctypes.data]) == 0
    registration = register(engine, array)
    engine.close()
    registration.close()  # it ended with its engine
    with register(engine):  # without memory it ends without a call of the engine
        pass


def test_a_write_in_flight_keeps_what_is_unregistered_meanwhile(engine, monkeypatch):
    """Ctrl-C may end the wait in `unregister`, but not the copy that this waits for."""
    source, target = make_pool(), make_pool()
    for pool in (source, target):
        assert engine.register(*addresses(pool)) == 0
    addrs, sizes = addresses(source)
    begun, go_on = threading.Event(), threading.Event()

    class Blocks:
        def lie_in(self, *_):
            return True

        def copy(self, _):
            begun.set()
            assert go_on.wait(60)

    monkeypatch.setattr(cpattn.transfer.local._core, "Blocks", lambda *_: Blocks())
    writer = threading.Thread(
        target=engine.write, args=[engine.session_id, addrs, addresses(target)[0], sizes]
    )
    writer.start()
    assert begun.wait(60)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.unregister(addrs)
    del source, pool
    gc.collect()
    assert is_mapped(addrs[0])
    go_on.set()
    writer.join()
    gc.collect()
    assert not is_mapped(addrs[0])


def test_placeholders_and_repetitions_are_left_out():
    ptrs, lens = [300, 0, 100, 300, 100, 500], [10, 0, 10, 10, 20, 0]
    assert registration_regions(ptrs, lens) == ([100, 300], [20, 10])
    assert registration_regions([300, 0, 100, 300], [10, 0, 10, 10]) == ([300, 100], [10, 10])
    assert (ptrs, lens) == ([300, 0, 100, 300, 100, 500], [10, 0, 10, 10, 20, 0])
    assert registration_regions([], []) == registration_regions([0, 7], [0, 0]) == ([], [])
    assert registration_regions([], [], alignment=2 * MiB) == ([], [])


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), max_size=8),
    st.sampled_from([2, 8, 32]),
)
def test_merged_ranges_cover_all_and_no_more_than_the_engine_rounds_to(regions, alignment):
    def rounded(begin, end):
        return set(range(begin // alignment, -(-end // alignment)))

    ptrs, lens = [ptr for ptr, _ in regions], [size for _, size in regions]
    addrs, sizes = registration_regions(ptrs, lens, alignment=alignment)
    merged = [(addr, addr + size) for addr, size in zip(addrs, sizes, strict=True)]
    for ptr, size in regions:
        assert not size or any(a <= ptr and ptr + size <= b for a, b in merged)
    blocks = [rounded(ptr, ptr + size) for ptr, size in regions if size]
    assert set().union(*(rounded(*range_) for range_ in merged)) == set().union(*blocks)
    for (_, end), (begin, _) in pairwise(merged):
        assert -(-end // alignment) < begin // alignment


@pytest.mark.parametrize(
    ("region", "rule"),
    [
        ((0, 1), r"ptrs and lens must be ranges of \[1, 2\^64\), got \(0, 1\) at 1"),
        ((2**64 - 8, 9), r"ptrs and lens must be ranges of \[1, 2\^64\), got \(184.*, 9\) at 1"),
        ((-1, 0), r"ptrs must be in \[0, 2\^64\), got -1 at index 1"),
        ((8, -1), r"lens must be in \[0, 2\^64\), got -1 at index 1"),
        ((8, 2**64), r"lens must be in \[0, 2\^64\), got 18446744073709551616 at index 1"),
    ],
)
@pytest.mark.parametrize("alignment", [1, 2 * MiB])
def test_regions_that_are_refused(region, rule, alignment):
    ptrs, lens = zip((64, 8), region, strict=True)
    with pytest.raises(ValueError, match=f"^registration_regions: {rule}"):
        registration_regions(ptrs, lens, alignment=alignment)
    with pytest.raises(ValueError, match="ptrs and lens must be equally many, got 2 and 1"):
        registration_regions([1, 2], [1], alignment=alignment)
    with pytest.raises(ValueError, match="alignment must be >= 1, got 0"):
        registration_regions([1], [1], alignment=0)


def test_arrays_become_plain_ints():
    regions = registration_regions(np.array([64, 8], np.uint64), np.array([8, 8], np.uint64))
    assert regions == ([64, 8], [8, 8])
    assert {type(number) for numbers in regions for number in numbers} == {int}


@pytest.mark.parametrize("alignment", [1, 2 * MiB])
def test_the_last_byte_of_the_address_space_may_be_registered(alignment):
    regions = ([2**64 - 8], [8])
    assert registration_regions(*regions, alignment=alignment) == regions
    assert registration_regions([1], [1], alignment=alignment) == ([1], [1])
