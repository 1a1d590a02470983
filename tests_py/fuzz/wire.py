# SPDX-License-Identifier: Apache-2.0
"""Target of the fuzzer: messages of peers in frames with any bytes, or nearly correct frames."""

import struct

from cpattn.transfer.wire import KVRegistration, KVTransferRequest, pack_int_lists, unpack_int_lists

from .reader import Reader, check_refusal

FORMATS = {"I": 4, "i": 4, "Q": 8}


def lists_of(reader: Reader, fmt: str) -> bytes:
    sizes = [FORMATS[fmt] * reader.between(0, 3) for _ in range(reader.between(0, 3))]
    count = len(sizes) + (reader.between(0, 2) - 1 if reader.rarely() else 0)
    head = struct.pack(f"<{len(sizes) + 1}I", max(count, 0), *sizes)
    return head + reader.take(sum(sizes) + reader.rarely())


def frame_of(reader: Reader) -> bytes:
    kind = reader.between(0, 6)
    if kind == 0:
        return b""
    if kind == 1:
        return b"%d" % abs(reader.any() if reader.flag() else reader.between(0, 99))
    if kind == 2:
        return b"10.0.0.1:4001"[: reader.between(0, 13)]
    if kind == 3:
        return reader.take(4 * reader.between(0, 6))
    if kind == 4:
        return lists_of(reader, reader.one_of(list(FORMATS)))
    if kind == 5:
        return reader.take(8 * reader.between(0, 4))
    return reader.take(reader.between(0, 30))


def frames_of(reader: Reader, message: type) -> list[bytes]:
    if message is KVRegistration:
        frames = KVRegistration(
            host="a", port=1, session_id="a:1", kv_data_ptrs=[1, 2], aux_data_ptrs=[3],
            state_data_ptrs=[[4], []], engine_rank=0, attn_tp_size=1, kv_item_len=8,
        ).to_frames()  # fmt: skip
    else:
        frames = KVTransferRequest(
            room=5, host="a", port=1, session_id="a:1", aux_index=0, required_count=1,
            page_indices=[1, 2], state_indices=[[1]],
        ).to_frames()  # fmt: skip
    for i in range(len(frames)):
        if reader.rarely(4):
            frames[i] = frame_of(reader)
    if reader.rarely(8):
        frames = frames[: reader.between(0, len(frames))]
    if reader.rarely(8):
        frames.append(frame_of(reader))
    return frames


def check_lists(reader: Reader) -> None:
    fmt = reader.one_of(("I", "i", "Q", "d", ""))
    frame = lists_of(reader, reader.one_of(list(FORMATS))) if reader.flag() else reader.take(60)
    try:
        lists = unpack_int_lists(frame, fmt)
    except ValueError as error:
        check_refusal(error, "unpack_int_lists: ")
        return
    assert unpack_int_lists(pack_int_lists(lists, fmt), fmt) == lists
    assert sum(map(len, lists)) * FORMATS[fmt] <= len(frame)


def run(data: bytes) -> None:
    reader = Reader(data)
    kind = reader.between(0, 2)
    if kind == 2:
        check_lists(reader)
        return
    message = KVTransferRequest if kind else KVRegistration
    frames = frames_of(reader, message)
    try:
        known = message.from_frames(frames)
    except ValueError as error:
        check_refusal(error, message.__name__)
        return
    written = known.to_frames()
    again = message.from_frames(written)
    assert again == known
    assert again.to_frames() == written
    assert repr(known) == repr(again)
