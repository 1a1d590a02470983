# SPDX-License-Identifier: Apache-2.0
"""Lists of addresses are read once: it is harmless to change them later, or meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from cpattn.transfer import LocalEngine, TransferPlan


class Shifty:
    """An integer that is another one each time it is read."""

    def __init__(self, *values):
        self.values = list(values)

    def __index__(self):
        return self.values.pop(0)


class Emptying:
    """An integer that empties the list which it is read from."""

    def __init__(self, value):
        self.value = value
        self.holder = None

    def __index__(self):
        self.holder.clear()
        return self.value


@pytest.fixture
def engine():
    with LocalEngine() as engine:
        yield engine


@pytest.mark.parametrize("which", ["source", "destination", "length"])
def test_a_write_copies_the_blocks_that_it_has_checked(engine, which):
    memory = np.zeros((3, 64), np.uint8)
    memory[0] = range(64)
    registered = memory[:2].nbytes
    base = memory.ctypes.data
    engine.register([base], [registered])
    outside = base + registered  # the third row, which nobody registered
    block = {"source": base, "destination": base + 64, "length": 32}
    later = {"source": outside, "destination": outside, "length": 128}
    block[which] = Shifty(block[which], later[which])
    lists = [[value] for value in block.values()]
    assert engine.write(engine.session_id, *lists) == 0
    assert memory[1, :32].tolist() == list(range(32))
    assert not memory[1, 32:].any()
    assert not memory[2].any()


def test_a_list_emptied_by_an_element_of_it():
    first = Emptying(7)
    first.holder = lengths = [first, *range(10**12, 10**12 + 500)]  # ints that only the list holds
    plan = TransferPlan([0] * 501, [0] * 501, lengths)
    assert lengths == []
    assert plan.lengths.tolist() == [7, *range(10**12, 10**12 + 500)]


def test_a_list_emptied_while_it_is_registered(engine):
    memory = np.zeros(1024, np.uint8)
    first = Emptying(memory.ctypes.data)
    first.holder = addrs = [first, memory.ctypes.data + 512]
    assert engine.register(addrs, [512, 512]) == 0
    assert engine.unregister([memory.ctypes.data, memory.ctypes.data + 512]) == 0
