# SPDX-License-Identifier: Apache-2.0
"""Arguments of other types than the transfer functions take, refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

import cpattn
from cpattn.transfer import KVSendCursor, plan_send_kvcache_slice, plan_send_state
from cpattn.transfer.wire import KVRegistration, KVTransferRequest

MASKED = np.ma.masked_array([0, 8], [False, True])


def pointers(function, src):
    return lambda: function(src, [0, 8], prefill_start_layer=0)


def send_slice(**changes):
    numbers = {
        "kv_data_ptrs": [0, 8], "kv_item_lens": [8, 8], "engine_rank": 0, "page_size": 1,
        "total_kv_head_num": 2, "attn_tp_size": 1, "dst_attn_tp_size": 2, "dst_tp_rank": 0,
    } | changes  # fmt: skip
    calls = {
        name: numbers.pop(name) for name in ("attn_tp_size", "dst_attn_tp_size", "dst_tp_rank")
    }
    args = SimpleNamespace(**numbers)
    return plan_send_kvcache_slice(args, [0, 8], [0], [0], dst_kv_item_len=4, **calls)


def request(**changes):
    fields = {"room": 5, "host": "h", "port": 1, "session_id": "s", "required_count": 1}
    return KVTransferRequest(**(fields | {"aux_index": 0} | changes)).to_frames()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KVSendCursor("10", 4), "KVSendCursor: num_tokens must be an integer, got str"),
        (lambda: KVSendCursor(10, 4.0), "KVSendCursor: page_size must be an integer, got float"),
        (lambda: KVSendCursor(10, 4, True), "KVSendCursor: decode_prefix_len must be an integer"),
        (lambda: KVSendCursor(10, 4).advance(2.5), "KVSendCursor.advance: num_computed must be an"),
        (lambda: KVSendCursor(10, 4).advance(0, end="4"), "KVSendCursor.advance: end must be an i"),
        *((pointers(getattr(cpattn.transfer, name), bad), f"{name}: src_kv_ptrs must be a list, "
           f"a tuple or an array of one dimension, got {type(bad).__name__}")
          for name in ("get_mha_kv_ptrs_with_pp", "get_mla_kv_ptrs_with_pp")
          for bad in (MASKED, memoryview(b"ab"), 5, np.int64(5), None)),
        *((lambda name=name: send_slice(**{name: "1"}),
           f"plan_send_kvcache_slice: {name} must be an integer, got str")
          for name in ("engine_rank", "attn_tp_size", "dst_attn_tp_size", "dst_tp_rank",
                       "total_kv_head_num")),
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
    """A mamba state has one slot; more must not slip in between the check and the plan."""

    class Growing:
        def __index__(self):
            slots.append(3)
            return 2

    slots = [Growing()]
    args = SimpleNamespace(state_types=["mamba"], state_data_ptrs=[[4096]], state_item_lens=[[64]])
    plan = plan_send_state(args, [[8192]], [slots], [[1]])
    assert plan.src_addrs.tolist() == [4096 + 2 * 64]
