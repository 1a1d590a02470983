# SPDX-License-Identifier: Apache-2.0
"""Transfer functions refuse arguments of other types; lists may change during a call."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer import LocalEngine, TransferPlan
from cpattn.transfer.sglang_0_5_23 import plan_send_kvcache_slice, plan_send_state
from cpattn.transfer.wire import KVRegistration, KVTransferRequest

MASKED = np.ma.masked_array([0, 8], [False, True])


def send_slice(**changes):
    numbers = {
        "kv_data_ptrs": [0, 8], "kv_item_lens": [8, 8], "engine_rank": 0, "page_size": 1,
        "total_kv_head_num": 2,
    } | changes  # fmt: skip
    ranks = {"attn_tp_size": 1, "dst_attn_tp_size": 2, "dst_tp_rank": 0, "dst_kv_item_len": 4}
    return plan_send_kvcache_slice(SimpleNamespace(**numbers), [0, 8], [0], [0], **ranks)


def request(**changes):
    fields = {"room": 5, "host": "h", "port": 1, "session_id": "s", "required_count": 1}
    return KVTransferRequest(**(fields | {"aux_index": 0} | changes)).to_frames()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda name=name: send_slice(**{name: "1"}),
           f"plan_send_kvcache_slice: {name} must be an integer, got str")
          for name in ("engine_rank", "total_kv_head_num")),
        (lambda: request(room="5"), "KVTransferRequest.to_frames: room: "),
        (lambda: request(host=b"h"), "KVTransferRequest.to_frames: host: "),
        (lambda: request(page_indices=MASKED), "KVTransferRequest.to_frames: page_indices: must"),
        (lambda: KVTransferRequest.from_frames(["5"] * 9),
         "KVTransferRequest.from_frames: frame 0 must be bytes, got str"),
        (lambda: KVRegistration.from_frames([5] * 12),
         "KVRegistration.from_frames: frame 0 must be bytes, got int"),
    ],
)  # fmt: skip
def test_refused(call, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        call()


def test_frames_may_be_views_of_buffers():
    frames = request()
    views = [memoryview(bytearray(frame)) for frame in frames]
    assert KVTransferRequest.from_frames(views) == KVTransferRequest.from_frames(frames)


def test_a_list_of_slots_that_changes_while_it_is_sent():
    """A mamba state has one slot; no more may slip in between the check and the plan."""

    class Growing:
        def __index__(self):
            slots.append(3)
            return 2

    slots = [Growing()]
    args = SimpleNamespace(state_types=["mamba"], state_data_ptrs=[[4096]], state_item_lens=[[64]])
    assert plan_send_state(args, [[8192]], [slots], [[1]]).src_addrs.tolist() == [4096 + 2 * 64]


# Lists of addresses are read once, so changing them later or during a call is harmless.


class Shifty:
    """An integer with another value each time that it is read."""

    def __init__(self, *values):
        self.values = list(values)

    def __index__(self):
        return self.values.pop(0)


class Emptying:
    """An integer that empties its list when it is read."""

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
    outside = base + registered  # nobody registered the third row
    block = {"source": base, "destination": base + 64, "length": 32}
    later = {"source": outside, "destination": outside, "length": 128}
    block[which] = Shifty(block[which], later[which])
    assert engine.write(engine.session_id, *[[value] for value in block.values()]) == 0
    assert memory[1, :32].tolist() == list(range(32))
    assert not memory[1, 32:].any()
    assert not memory[2].any()


def test_a_list_emptied_by_an_element_of_it():
    first = Emptying(7)
    first.holder = lengths = [first, *range(10**12, 10**12 + 500)]  # only the list holds these ints
    plan = TransferPlan([0] * 501, [0] * 501, lengths)
    assert lengths == []
    assert plan.lengths.tolist() == [7, *range(10**12, 10**12 + 500)]


def test_a_list_emptied_while_it_is_registered(engine):
    memory = np.zeros(1024, np.uint8)
    first = Emptying(memory.ctypes.data)
    first.holder = addrs = [first, memory.ctypes.data + 512]
    assert engine.register(addrs, [512, 512]) == 0
    assert engine.unregister([memory.ctypes.data, memory.ctypes.data + 512]) == 0
