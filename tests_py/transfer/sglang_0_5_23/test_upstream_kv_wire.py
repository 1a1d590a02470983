# SPDX-License-Identifier: Apache-2.0
"""Random messages and registrations of servers agree with sglang's own code.

The tests run where a wheel of sglang 0.5.23 is at hand (see `sglang_upstream`).
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpattn.transfer import wire
from support.sglang import sglang_upstream
from support.sglang.sglang_upstream import make_manager


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    modules = sglang_upstream.load_or_skip()
    if not hasattr(modules.mooncake.MooncakeKVManager, "build_receiver_metadata_message"):
        pytest.skip("sglang is older than 0.5.23: its messages have fewer frames")
    return modules


PEER = {"host": "10.0.0.1", "session_id": "10.0.0.1:4001"}


def random_lists(rng: np.random.Generator, low: int, high: int) -> list[list[int]]:
    dtype = np.int64 if low else np.uint64
    sizes = rng.integers(0, 5, rng.integers(0, 4))
    return [rng.integers(low, high, size, dtype).tolist() for size in sizes]


def random_registration(rng: np.random.Generator) -> wire.KVRegistration:
    item_lens = rng.integers(1, 2**40, rng.integers(0, 8)).tolist()
    staging = rng.random() < 0.5
    return wire.KVRegistration(
        **PEER,
        port=int(rng.integers(1, 65536)),
        kv_data_ptrs=rng.integers(0, 2**64, len(item_lens), dtype=np.uint64).tolist(),
        aux_data_ptrs=rng.integers(0, 2**64, rng.integers(0, 4), dtype=np.uint64).tolist(),
        state_data_ptrs=random_lists(rng, 0, 2**64),
        engine_rank=int(rng.integers(0, 8)),
        attn_tp_size=int(rng.integers(1, 9)),
        kv_item_len=item_lens[0] if item_lens else 0,
        state_item_lens=random_lists(rng, 0, 2**32),
        state_dim_per_tensor=random_lists(rng, 0, 2**32),
        kv_layer_ids=rng.integers(0, 2**32, rng.integers(0, 8)).tolist(),
        state_layer_ids=random_lists(rng, 0, 2**32),
        staging_ptr=int(rng.integers(1, 2**63)) if staging else None,
        staging_bytes=int(rng.integers(1, 2**40)) if staging else None,
        dcp_size=int(rng.integers(1, 5)),
        dcp_rank=int(rng.integers(0, 4)),
        staging_layer_ids=rng.integers(0, 100, 4 * staging).tolist(),
        kv_item_lens=item_lens,
    )


def upstream_fields(message: wire.KVRegistration) -> dict[str, Any]:
    """Return a registration by the names of sglang's parser."""
    differ = {
        "host": "endpoint", "port": "dst_port", "session_id": "mooncake_session_id",
        "kv_data_ptrs": "dst_kv_ptrs", "aux_data_ptrs": "dst_aux_ptrs",
        "engine_rank": "dst_tp_rank", "staging_ptr": "staging_base_ptr",
        "staging_bytes": "staging_total_size",
    }  # fmt: skip
    values = {differ.get(name, f"dst_{name}"): value for name, value in vars(message).items()}
    values |= {name: values[name] or 0 for name in ("staging_base_ptr", "staging_total_size")}
    del values["dst_staging_layer_ids"]
    return values | {"room": "None"}


def test_registrations_are_read_as_upstream_reads_them(sglang, rng):
    for _ in range(300):
        frames = random_registration(rng).to_frames()[: rng.integers(10, 21)]
        theirs = sglang.mooncake.KVArgsRegisterInfo.from_zmq(frames)
        ours = upstream_fields(wire.KVRegistration.from_frames(frames))
        assert {name: getattr(theirs, name) for name in ours} == ours


def wire_manager(sglang: SimpleNamespace, message: Any, **attributes: Any) -> Any:
    peer = {"local_ip": message.host, "rank_port": message.port}
    peer["get_session_id"] = lambda: message.session_id
    return make_manager(sglang, "mooncake", **peer, **attributes)


def test_registrations_are_written_as_upstream_writes_them(sglang, rng):
    for _ in range(300):
        message = random_registration(rng)
        staging = SimpleNamespace(
            get_base_ptr=lambda message=message: message.staging_ptr,
            get_total_size=lambda message=message: message.staging_bytes,
        )
        manager = wire_manager(
            sglang,
            message,
            kv_args=message,  # its names are those of KVArgs
            attn_tp_size=message.attn_tp_size,
            dcp_size=message.dcp_size,
            dcp_rank=message.dcp_rank,
            enable_staging=message.staging_ptr is not None,
            _staging_ctx=SimpleNamespace(allocator=staging),
            kv_buffer_tensors={"slot_layer_ids": message.staging_layer_ids},
        )
        frames = manager.build_receiver_registration_message()
        assert message.to_frames() == frames
        assert wire.KVRegistration.from_frames(frames) == message


def test_requests_are_written_and_read_as_upstream_does(sglang, rng):
    for _ in range(300):
        dummy = rng.random() < 0.2
        pages = rng.integers(0, 2**31, 0 if dummy else rng.integers(0, 9), np.int32)
        message = wire.KVTransferRequest(
            **PEER,
            room=int(rng.integers(0, 2**63)),
            port=int(rng.integers(1, 65536)),
            page_indices=pages,
            aux_index=None if dummy else int(rng.integers(0, 100)),
            state_indices=[] if dummy else random_lists(rng, -(2**31), 2**31),
            required_count=int(rng.integers(1, 9)),
            decode_prefix_len=int(rng.integers(0, 3)) * 64,
            device_page_indices=pages[: rng.integers(0, 9)],
        )
        frames = wire_manager(sglang, message).build_receiver_metadata_message(
            bootstrap_room=message.room, required_dst_info_num=message.required_count,
            kv_indices=pages, aux_index=message.aux_index, state_indices=message.state_indices,
            decode_prefix_len=message.decode_prefix_len, is_dummy=dummy,
            device_kv_indices=message.device_page_indices,
        )  # fmt: skip
        assert message.to_frames() == frames
        ours = wire.KVTransferRequest.from_frames(frames)
        assert ours == message
        theirs = sglang.mooncake.TransferInfo.from_zmq(frames)
        assert ours.page_indices.tolist() == theirs.dst_kv_indices.tolist()
        for name, of_theirs in {
            "is_dummy": "is_dummy", "room": "room", "aux_index": "dst_aux_index",
            "state_indices": "dst_state_indices", "required_count": "required_dst_info_num",
            "decode_prefix_len": "decode_prefix_len",
        }.items():  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, of_theirs), name
