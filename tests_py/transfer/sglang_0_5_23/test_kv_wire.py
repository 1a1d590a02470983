# SPDX-License-Identifier: Apache-2.0
"""Messages between servers have the right bytes, also from older servers; others are refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.wire import KVRegistration, KVTransferRequest, pack_int_lists, unpack_int_lists

LIMITS = {"I": (0, 2**32 - 1), "i": (-(2**31), 2**31 - 1), "Q": (0, 2**64 - 1)}
PEER = {"host": "10.0.0.1", "port": 4000, "session_id": "10.0.0.1:4001"}
NUM_OLD_FRAMES = 10  # a registration had so many before layer ids and DCP


def registration(**changes):
    fields = {
        "kv_data_ptrs": [1 << 47, 2**64 - 1], "aux_data_ptrs": [4096], "engine_rank": 3,
        "state_data_ptrs": [[1 << 40], []], "attn_tp_size": 4, "kv_item_len": 1 << 40,
    }  # fmt: skip
    return KVRegistration(**PEER | fields | changes)


def request(**changes):
    fields = {"room": 2**63 - 1, "page_indices": np.array([3, 4, 2**31 - 1])}
    return KVTransferRequest(**PEER | fields | {"aux_index": 7, "required_count": 2} | changes)


@given(st.data(), st.sampled_from(sorted(LIMITS)))
def test_lists_survive_the_way(data, fmt):
    lists = data.draw(st.lists(st.lists(st.integers(*LIMITS[fmt]))))
    packed = pack_int_lists(lists, fmt)
    assert unpack_int_lists(packed, fmt) == lists
    cut = data.draw(st.integers(1, max(1, len(packed) - 1)))
    for damaged in [packed + b"\0", packed[:cut] if len(packed) > cut else b"\0"]:
        with pytest.raises(ValueError, match="unpack_int_lists"):
            unpack_int_lists(damaged, fmt)


def test_lists_that_are_refused():
    for fmt, (low, high) in LIMITS.items():
        for value in (low - 1, high + 1, 1.5):
            with pytest.raises(ValueError, match=f"pack_int_lists: list 1 .*format '{fmt}'"):
                pack_int_lists([[], [value]], fmt)
    with pytest.raises(ValueError, match="unpack_int_lists: list 0 must hold integers of 8 bytes"):
        unpack_int_lists(pack_int_lists([[1]], "I"), "Q")
    with pytest.raises(ValueError, match=r"must end at byte 8 .* got 8 bytes in a frame of 1"):
        unpack_int_lists(b"\1", "I")
    with pytest.raises(ValueError, match="of 4294967295 lists"):  # nothing is allocated
        unpack_int_lists(b"\xff" * 16, "I")
    with pytest.raises(ValueError, match="fmt must be one of I, i, Q, got 'L'"):
        pack_int_lists([], "L")
    with pytest.raises(ValueError, match="fmt must be one of"):
        unpack_int_lists(b"", "<I")


def test_frames_of_a_registration():
    full = registration(
        state_item_lens=[[64], []], kv_layer_ids=[0, 1], staging_ptr=0x1000, staging_bytes=1 << 30,
        staging_layer_ids=[5], dcp_size=2, dcp_rank=1, kv_item_lens=[1 << 40, 512],
    )  # fmt: skip
    frames = full.to_frames()
    pack = struct.pack
    assert frames == [
        *(b"None", b"10.0.0.1", b"4000", b"10.0.0.1:4001", pack("<2Q", 1 << 47, 2**64 - 1)),
        *(pack("<Q", 4096), pack("<3IQ", 2, 8, 0, 1 << 40), b"3", b"4", b"1099511627776"),
        *(pack("<4I", 2, 4, 0, 64), b"", pack("<2I", 0, 1), b"", pack("<Q", 0x1000)),
        *(b"1073741824", b"2", b"1", pack("<Q", 5), pack("<2Q", 1 << 40, 512)),
    ]
    read = KVRegistration.from_frames(frames)
    assert read == full
    assert read.kv_data_ptrs == [1 << 47, 2**64 - 1]
    assert (read.staging_ptr, read.state_dim_per_tensor, read.dcp_rank) == (0x1000, [], 1)


def test_registrations_of_older_and_newer_servers():
    frames = registration().to_frames()
    for num_frames in range(NUM_OLD_FRAMES, len(frames)):
        assert KVRegistration.from_frames(frames[:num_frames]) == registration()
    assert KVRegistration.from_frames([*frames, b"of tomorrow"]) == registration()
    short = KVRegistration.from_frames(frames[:NUM_OLD_FRAMES])
    fields = short.kv_layer_ids, short.staging_ptr, short.dcp_size, short.dcp_rank
    assert fields == ([], None, 1, 0)
    with pytest.raises(ValueError, match="frames must be at least 10"):
        KVRegistration.from_frames(frames[: NUM_OLD_FRAMES - 1])


def test_frames_of_a_request():
    frames = request(state_indices=[[5], [-1, 6]], decode_prefix_len=64).to_frames()
    assert frames == [
        *(b"9223372036854775807", b"10.0.0.1", b"4000", b"10.0.0.1:4001"),
        *(struct.pack("<3i", 3, 4, 2**31 - 1), b"7", struct.pack("<3I3i", 2, 4, 8, 5, -1, 6)),
        *(b"2", b"64", b""),
    ]
    read = KVTransferRequest.from_frames(frames)
    assert read.page_indices.dtype == np.int32
    assert read.page_indices.tolist() == [3, 4, 2**31 - 1]
    assert (read.aux_index, read.state_indices, read.is_dummy) == (7, [[5], [-1, 6]], False)
    assert read != request()
    assert KVTransferRequest.from_frames(request().to_frames()[:8]) == request()
    with pytest.raises(ValueError, match="frames must be at least 8"):
        KVTransferRequest.from_frames(frames[:7])


def test_dummies_are_not_requests_without_pages():
    dummy = request(page_indices=[], aux_index=None)
    assert dummy.to_frames()[4:7] == [b"", b"", b""]
    assert KVTransferRequest.from_frames(dummy.to_frames()).is_dummy
    all_cached = KVTransferRequest.from_frames(request(page_indices=[], aux_index=0).to_frames())
    assert (all_cached.is_dummy, len(all_cached.page_indices)) == (False, 0)
    for changes in ({}, {"page_indices": [], "state_indices": [[1]]}):
        with pytest.raises(ValueError, match="aux_index must be given with pages or state"):
            request(aux_index=None, **changes)


@pytest.mark.parametrize(
    ("message", "i", "frame", "error"),
    [
        (registration(), 2, b"", r"frame 2 \(port\): must be a decimal number, got b''"),
        (registration(), 2, b"-1", r"frame 2 \(port\): must be a decimal number"),
        (registration(), 4, b"1234567", r"frame 4 \(kv_data_ptrs\): must hold integers of 8 bytes"),
        (registration(), 6, b"\1\0\0\0", r"frame 6 \(state_data_ptrs\): unpack_int_lists"),
        (registration(), 14, b"1234", "staging_ptr.*8 bytes"),
        (registration(), 0, b"5", r"start with \[b'None'\], got \d+ that start with \[b'5'\]$"),
        (request(), 0, b"None", r"frame 0 \(room\): must be a decimal number, got b'None'"),
        (request(), 4, b"12345", r"frame 4 \(page_indices\): must hold integers of 4 bytes"),
        (request(), 5, b"", "aux_index must be given"),
        (request(), 5, b"None", r"frame 5 \(aux_index\): must be a decimal number"),
        (request(), 1, b"\xff", r"frame 1 \(host\): .*ascii"),
    ],
)
def test_frames_that_are_refused(message, i, frame, error):
    frames = message.to_frames()
    frames[i] = frame
    with pytest.raises(ValueError, match=error):
        type(message).from_frames(frames)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (registration(port=-1), "KVRegistration.to_frames: port: must be >= 0, got -1"),
        (registration(kv_data_ptrs=[-1]), "kv_data_ptrs: must be integers of format 'Q'"),
        (registration(state_item_lens=[[2**32]]), "state_item_lens: .*list 0 must be integers"),
        (registration(host="dé"), "host: .*ascii"),
        (request(page_indices=[1, 2**31]), "page_indices: must fit into int32, got .* at 1"),
        (request(page_indices=[0.5]), "page_indices: must be int32 of shape"),
        (request(page_indices=[[1]]), r"must be int32 of shape \[n\], got int64 of shape \(1, 1\)"),
    ],
)
def test_messages_that_cannot_be_sent(message, error):
    with pytest.raises(ValueError, match=error):
        message.to_frames()
