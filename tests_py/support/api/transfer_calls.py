# SPDX-License-Identifier: Apache-2.0
"""Good calls of KV transfer, whose arguments take more than a line to make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import cpattn
from cpattn import distributed, transfer
from cpattn.distributed.plans.plan import make_plan
from cpattn.kv import PageInterleave
from cpattn.transfer import wire
from support.api import argument_kinds
from support.api.api_call_kinds import Arguments, Good


def memory(*shape: int, dtype: Any = np.uint8) -> Any:
    return np.zeros(shape, dtype)


def kv_args(num_layers: int = 2, **more: Any) -> transfer.KVArgs:
    """Of a stage with all layers, K and V, eight pages of 64 bytes in each buffer."""
    count = 2 * num_layers
    return transfer.KVArgs(
        engine_rank=0, page_size=4, kv_head_num=2, total_kv_head_num=2,
        kv_data_ptrs=[(1 << 30) + 4096 * i for i in range(count)], kv_data_lens=[512] * count,
        kv_item_lens=[64] * count, prefill_start_layer=0, prefill_end_layer=num_layers,
        total_kv_layers=num_layers, hidden_kv_layers=num_layers, draft_kv_layers=0,
        kv_buf_groups=2, aux_data_ptrs=[1 << 20], aux_data_lens=[256], aux_item_lens=[16],
        state_types=["mamba"], state_data_ptrs=[[1 << 21]], state_data_lens=[[256]],
        state_item_lens=[[32]], **more,
    )  # fmt: skip


TARGET_PTRS = [(1 << 31) + 4096 * i for i in range(4)]
PAGES = {"src_pages": ("ints", [1, 2, 5]), "dst_pages": ("ints", [3, 4, 6])}


def layout(base: int = 1 << 30, **more: Any) -> transfer.KVLayout:
    entries = [
        transfer.KVEntry(layer, kind, False, base + 4096 * (2 * layer + (kind == "v")), 512, 64)
        for layer in range(2)
        for kind in ("k", "v")
    ]
    return transfer.KVLayout(entries, page_size=4, **more)


def pointers() -> Arguments:
    return {
        "src_kv_ptrs": ("list", [10, 11, 12, 13]),
        "dst_kv_ptrs": ("list", [20, 21, 22, 23]),
        "prefill_start_layer": ("int", 0),
        "total_kv_layers": ("?int", 2),
        "compat": ("flag", False),
    }


def engines() -> tuple[transfer.LocalEngine, transfer.LocalEngine, Any, Any, Callable[[], None]]:
    """Two engines with memory of their own registered."""
    sender, receiver = (
        transfer.LocalEngine(num_threads=1),
        transfer.LocalEngine(num_threads=1),
    )
    src, dst = np.arange(256, dtype=np.uint8), memory(256)
    sender.register([src.ctypes.data], [src.nbytes])
    receiver.register([dst.ctypes.data], [dst.nbytes])

    def close() -> None:
        sender.close()
        receiver.close()

    return sender, receiver, src, dst, close


def engine_write() -> Good:
    sender, receiver, src, dst, close = engines()
    arguments = {
        "session": ("text", receiver.session_id),
        "src_addrs": ("addresses", [src.ctypes.data, src.ctypes.data + 64]),
        "dst_addrs": ("addresses", [dst.ctypes.data + 128, dst.ctypes.data]),
        "lengths": ("addresses", [16, 32]),
    }
    return Good(sender.write, arguments, close)


def engine_register() -> Good:
    engine, block = transfer.LocalEngine(num_threads=1), memory(128)
    arguments = {
        "addrs": ("addresses", [block.ctypes.data, block.ctypes.data + 64]),
        "sizes": ("addresses", [64, 64]),
    }
    keep = SimpleNamespace(block=block)

    def close() -> None:
        engine.close()
        del keep.block

    return Good(engine.register, arguments, close)


def engine_unregister() -> Good:
    sender, _, src, _, close = engines()
    return Good(sender.unregister, {"addrs": ("addresses", [src.ctypes.data])}, close)


def execute() -> Good:
    sender, receiver, src, dst, close = engines()
    plan = transfer.TransferPlan([src.ctypes.data], [dst.ctypes.data], [64])
    arguments = {
        "engine": ("value", sender),
        "session": ("text", receiver.session_id),
        "max_blocks": ("?int", 1),
        "timeout": ("?float", 10.0),
        "retries": ("times", 0),
        "progress": ("any", None),
        "check": ("flag", True),
    }
    return Good(
        plan.execute,
        arguments,
        close,
        (transfer.TransferError, TimeoutError),
        prefixes=("LocalEngine.write: ",),
    )


def register() -> Good:
    engine = transfer.LocalEngine(num_threads=1)

    def call(tensor: Any) -> Any:
        return transfer.register(engine, tensor)

    return Good(
        call, {"tensor": ("buffer", memory(64))}, engine.close, (transfer.TransferError,),
        ("argument", "array", "tensor", "ptrs", "addrs"),
        ("registration_regions: ", "LocalEngine.register: "),
    )  # fmt: skip


def closed_registration() -> Good:
    engine = transfer.LocalEngine(num_threads=1)
    registration = transfer.register(engine, memory(64))
    return Good(registration.close, {}, engine.close)


def registration_message(**more: Any) -> wire.KVRegistration:
    return wire.KVRegistration(
        host="h", port=1, session_id="s", kv_data_ptrs=[1], aux_data_ptrs=[2],
        state_data_ptrs=[[3]], engine_rank=0, attn_tp_size=1, kv_item_len=64, **more,
    )  # fmt: skip


METADATA = argument_kinds.METADATA
EXPECTED = {"num_tokens": ("?int", 12), "first_token": ("?int", 0)}
LINKS: Arguments = {
    "src_start": ("int", 0),
    "dst_start": ("int", 0),
    "cp_size": ("int", 1),
    "cp_share": ("text", "pages"),
}


def links() -> Good:
    arguments = {
        "sources": ("value", [layout()]),
        "destinations": ("value", [layout(1 << 31)]),
        "src_pages": ("value", [[1, 2, 5]]),
        "dst_pages": ("value", [[3, 4, 6]]),
        **EXPECTED,
        **LINKS,
        "cp_ranks": ("?ints", [0]),
    }
    # What a link refuses, in the words of its plan.
    return Good(transfer.plan_kv_links, arguments, prefixes=("plan_kv_transfer: ",), names=PAIRED)


def transfer_plan() -> Good:
    arguments = {
        "src": ("value", layout()),
        "dst": ("value", layout(1 << 31)),
        **PAGES,
        **EXPECTED,
        **LINKS,
        "cp_rank": ("int", 0),
    }
    return Good(transfer.plan_kv_transfer, arguments, names=PAIRED)


def send_kvcache() -> Good:
    arguments = {
        "kv_args": ("bag", kv_args()),
        "dst_ptrs": ("addresses", TARGET_PTRS),
        **PAGES,
        "pp_size": ("int", 1),
        "is_mla": ("flag", True),
        "is_last_rank": ("flag", False),
        "dst_item_lens": ("?addresses", [64] * 4),
        "compat": ("flag", False),
    }
    return Good(
        transfer.plan_send_kvcache,
        arguments,
        errors=(IndexError,),
        names=BAG,
        prefixes=SLICED,
    )


def send_slice() -> Good:
    arguments = {
        "kv_args": ("bag", kv_args()),
        "dst_ptrs": ("addresses", TARGET_PTRS),
        **PAGES,
        "dst_tp_rank": ("int", 0),
        "dst_attn_tp_size": ("int", 2),
        "dst_kv_item_len": ("int", 32),
        "attn_tp_size": ("int", 1),
        "pp_size": ("int", 1),
        "is_last_rank": ("flag", False),
        "compat": ("flag", False),
    }
    return Good(
        transfer.plan_send_kvcache_slice,
        arguments,
        errors=(IndexError,),
        names=BAG,
        prefixes=SLICED,
    )


def send_aux() -> Good:
    arguments = {
        "kv_args": ("bag", kv_args()),
        "dst_aux_ptrs": ("addresses", [1 << 22]),
        "src_aux_index": ("int", 3),
        "dst_aux_index": ("int", 2),
        "dst_item_lens": ("?addresses", [16]),
        "compat": ("flag", False),
    }
    return Good(transfer.plan_send_aux, arguments, errors=(IndexError,), names=BAG, prefixes=SLICED)


def send_state() -> Good:
    arguments = {
        "kv_args": ("bag", kv_args()),
        "dst_state_ptrs": ("value", [[1 << 23]]),
        "src_state_indices": ("value", [[3]]),
        "dst_state_indices": ("value", [[2]]),
        "is_mla": ("flag", False),
        "attn_tp_size": ("int", 1),
        "dst_attn_tp_size": ("int", 1),
        "dst_state_item_lens": ("?value", [[32]]),
        "dst_state_layer_ids": ("?value", [[]]),
        "pp_size": ("int", 1),
        "kv_shard_rank": ("int", 0),
        "kv_shard_size": ("int", 1),
        "allow_dst_elision": ("?flag", False),
        "compat": ("flag", False),
    }
    return Good(
        transfer.plan_send_state,
        arguments,
        errors=(IndexError, RuntimeError),
        names=BAG,
        prefixes=SLICED,
    )


PAIRED = ("source", "destination", "layer", "tokens", "page")
SLICED = ("slice_heads: ", "group_concurrent_contiguous ")
BAG = (
    "engine_rank", "page_size", "kv_head_num", "kv_data_ptrs", "kv_data_lens", "kv_item_lens",
    "prefill_start_layer", "prefill_end_layer", "kv_layers", "kv_buf_groups", "aux_", "state",
    "source ", "destination ", "heads", "indices", "index arrays", "components", "stage",
    "item lengths",
)  # fmt: skip


def cursor() -> Good:
    arguments = {
        "num_computed": ("int", 6),
        "last_chunk": ("flag", False),
        "end": ("?int", None),
    }
    return Good(transfer.KVSendCursor(10, 4).advance, arguments)


def chunk() -> Good:
    arguments = {
        "kv_indices": ("ints", list(range(16))),
        "dst_page_indices": ("ints", [5, 6, 7, 8]),
    }
    return Good(
        transfer.KVChunk(4, 12, 1, 3, False, 4).select,
        arguments,
        names=("pages",),
        prefixes=("kv_to_page_indices: ",),
    )


FILTERS = ("filter_kv_indices_for_shard_rank: ", "filter_kv_indices_for_cp_rank: ")


def send_indices() -> Good:
    arguments = {
        "sender": ("value", transfer.KVSender(kv_shard_rank=1, kv_shard_size=2)),
        "kv_indices": ("ints", [8, 9, 11]),
        "curr_idx": ("int", 2),
        "num_kv_indices": ("int", 5),
        "compat": ("flag", False),
    }
    return Good(transfer.plan_send_indices, arguments, names=("pages",), prefixes=FILTERS)


def selected() -> Good:
    sender = transfer.KVSender(kv_shard_rank=1, kv_shard_size=2)
    found = transfer.plan_send_indices(sender, [8, 9, 11], curr_idx=0, num_kv_indices=3)
    return Good(found.select, {"dst_kv_indices": ("ints", [5, 6, 7])})


def planned() -> Good:
    """The planner of `ContextParallel`, which needs no process group."""
    cp = object.__new__(distributed.ContextParallel)
    cp.cp_rank, cp.cp_size, cp.strategy, cp.page_size = 0, 2, "zigzag", 4
    arguments = {
        "extend_lens": ("ints", [4, 4]),
        "seq_lens": ("?ints", [7, 4]),
        "block_tables": ("table", [[1, 2], [3, -1]]),
        "out_cache_loc": ("?ints", [7, 8, 9, 10, 12, 13, 14, 15]),
        "num_tokens": ("?int", 8),
        "pad_to_physical": ("flag", False),
        "custom_mask": ("any tensor", np.ones(44, bool)),
    }
    return Good(cp.plan, arguments, prefixes=("build_cp_metadata: ", "unshard: "))


def planned_decode() -> Good:
    """A step over shards of two ranks, planned without their group."""
    cp = object.__new__(distributed.ContextParallel)
    cp.cp_rank, cp.cp_size, cp.page_size = 0, 2, 4
    cp.placement = PageInterleave(shard_size=2, page_size=4)
    arguments = {
        "kv_lens": ("ints", [7, 4]),
        "block_tables": ("table", [[1, 2], [3, -1]]),
        "q_lens": ("?ints", [2, 1]),
        "custom_mask": ("any tensor", np.ones(18, bool)),
    }
    return Good(cp.plan_decode, arguments)


def sharded() -> Good:
    cp = object.__new__(distributed.ContextParallel)
    cp._exchange = SimpleNamespace(rank=0, size=2)
    plan = make_plan(
        METADATA, [4, 4], block_tables=[[1, 2], [3, -1]], out_cache_loc=None, page_size=4,
        pad_to_physical=False,
    )  # fmt: skip
    x = np.ones((8, 2), np.float32)
    arguments = {"plan": ("value", plan), "x": ("any tensor", x), "dim": ("int", 0)}
    return Good(cp.shard, arguments, prefixes=("ContextParallel.shard: ",))


def profiled() -> Good:
    with cpattn.profile(max_events=10) as profile:
        cpattn.sparse.hadamard_transform(np.ones((2, 16), np.float32))
    return Good(
        profile.select,
        {"scope": ("value", cpattn.profiling.TraceScope.call), "thread": ("?int", 0)},
    )


def of(
    function: Callable[..., Any], names: tuple[str, ...] = (), **arguments: tuple[str, Any]
) -> Callable[[], Good]:
    return lambda: Good(function, copy.deepcopy(arguments), names=names)


def method(make: Callable[[], Any], name: str, **arguments: tuple[str, Any]) -> Callable[[], Good]:
    return lambda: Good(getattr(make(), name), copy.deepcopy(arguments))
