# SPDX-License-Identifier: Apache-2.0
"""Good calls of KV transfer, of pools and of planners, with new arguments each time."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import cpattn
from cpattn import kv, transfer
from cpattn.transfer import sglang_0_5_23, wire
from support.api.argument_kinds import METADATA, Arguments, Call, f32, given, of_kind

PAIRED = ("source", "destination", "layer", "tokens", "page")
SLICED = ("slice_heads: ", "group_concurrent_contiguous ")
BAG = (
    "engine_rank", "page_size", "kv_head_num", "kv_data_ptrs", "kv_data_lens", "kv_item_lens",
    "prefill_start_layer", "prefill_end_layer", "kv_layers", "kv_buf_groups", "aux_", "state",
    "source ", "destination ", "heads", "indices", "index arrays", "components", "stage",
    "item lengths",
)  # fmt: skip
FILTERS = ("filter_kv_indices_for_shard_rank: ", "filter_kv_indices_for_cp_rank: ")


def merged(parts: tuple[Arguments, ...]) -> Arguments:
    return {name: value for part in parts for name, value in part.items()}


def of(function: Callable[..., Any], *parts: Arguments, **about: Any) -> Callable[[], Call]:
    """Return a function that makes a call with own arguments; `about` has other `Call` fields."""
    return lambda: Call(function, copy.deepcopy(merged(parts)), **about)


def method(make: Callable[[], Any], name: str, *parts: Arguments, **about: Any) -> Any:
    """Make a call as `of`, for a method of an object that is also new each time."""
    return lambda: Call(getattr(make(), name), copy.deepcopy(merged(parts)), **about)


def kv_args(num_layers: int = 2, **more: Any) -> sglang_0_5_23.KVArgs:
    """Describe a stage with all layers, K and V, eight pages of 64 bytes in each buffer."""
    count = 2 * num_layers
    return sglang_0_5_23.KVArgs(
        engine_rank=0, page_size=4, kv_head_num=2, total_kv_head_num=2,
        kv_data_ptrs=[(1 << 30) + 4096 * i for i in range(count)], kv_data_lens=[512] * count,
        kv_item_lens=[64] * count, prefill_start_layer=0, prefill_end_layer=num_layers,
        total_kv_layers=num_layers, hidden_kv_layers=num_layers, draft_kv_layers=0,
        kv_buf_groups=2, aux_data_ptrs=[1 << 20], aux_data_lens=[256], aux_item_lens=[16],
        state_types=["mamba"], state_data_ptrs=[[1 << 21]], state_data_lens=[[256]],
        state_item_lens=[[32]], **more,
    )  # fmt: skip


def layout(base: int = 1 << 30, **more: Any) -> transfer.KVLayout:
    entries = [
        transfer.KVEntry(layer, kind, False, base + 4096 * (2 * layer + (kind == "v")), 512, 64)
        for layer in range(2)
        for kind in ("k", "v")
    ]
    return transfer.KVLayout(entries, page_size=4, **more)


def engines() -> tuple[transfer.LocalEngine, transfer.LocalEngine, Any, Any, Callable[[], None]]:
    """Return two engines with their own memory registered."""
    sender, receiver = transfer.LocalEngine(num_threads=1), transfer.LocalEngine(num_threads=1)
    src, dst = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    sender.register([src.ctypes.data], [src.nbytes])
    receiver.register([dst.ctypes.data], [dst.nbytes])

    def close() -> None:
        sender.close()
        receiver.close()

    return sender, receiver, src, dst, close


def engine_write() -> Call:
    sender, receiver, src, dst, close = engines()
    blocks = of_kind(
        "addresses",
        src_addrs=[src.ctypes.data, src.ctypes.data + 64],
        dst_addrs=[dst.ctypes.data + 128, dst.ctypes.data],
        lengths=[16, 32],
    )
    return Call(sender.write, given(session=receiver.session_id) | blocks, close=close)


def engine_register() -> Call:
    engine, block = transfer.LocalEngine(num_threads=1), np.zeros(128, np.uint8)
    addrs = [block.ctypes.data, block.ctypes.data + 64]
    blocks = of_kind("addresses", addrs=addrs, sizes=[block.size // 2] * 2)
    return Call(engine.register, blocks, close=lambda: (engine.close(), block.fill(0)))


def engine_unregister() -> Call:
    sender, _, src, _, close = engines()
    return Call(sender.unregister, of_kind("addresses", addrs=[src.ctypes.data]), close=close)


def engine_differing() -> Call:
    call = engine_write()
    return replace(call, function=call.function.__self__.differing)


def execute() -> Call:
    sender, receiver, src, dst, close = engines()
    plan = transfer.TransferPlan([src.ctypes.data], [dst.ctypes.data], [64])
    arguments = given(engine=sender, session=receiver.session_id, max_blocks=1, timeout=10.0)
    arguments |= given(check=True, verify=True) | of_kind("times", retries=0)
    arguments |= of_kind("any", progress=None)
    errors = (transfer.TransferError, TimeoutError)
    prefixes = ("LocalEngine.write: ", "LocalEngine.differing: ")
    return Call(plan.execute, arguments, close=close, errors=errors, prefixes=prefixes)


def register() -> Call:
    engine = transfer.LocalEngine(num_threads=1)

    def call(tensor: Any) -> Any:
        return transfer.register(engine, tensor)

    return Call(
        call, of_kind("buffer", tensor=np.zeros(64, np.uint8)), close=engine.close,
        errors=(transfer.TransferError,), names=("argument", "array", "tensor", "ptrs", "addrs"),
        prefixes=("registration_regions: ", "LocalEngine.register: "),
    )  # fmt: skip


def closed_registration() -> Call:
    engine = transfer.LocalEngine(num_threads=1)
    registration = transfer.register(engine, np.zeros(64, np.uint8))
    return Call(registration.close, {}, close=engine.close)


def registration_message(**more: Any) -> wire.KVRegistration:
    return wire.KVRegistration(
        host="h", port=1, session_id="s", kv_data_ptrs=[1], aux_data_ptrs=[2],
        state_data_ptrs=[[3]], engine_rank=0, attn_tp_size=1, kv_item_len=64, **more,
    )  # fmt: skip


PAGES = of_kind("ints", src_pages=[1, 2, 5], dst_pages=[3, 4, 6])
TOKENS = given(num_tokens=12, first_token=0, src_start=0, dst_start=0, cp_size=1, cp_share="pages")


def links() -> Call:
    sides = of_kind("value", sources=[layout()], destinations=[layout(1 << 31)])
    pages = of_kind("value", src_pages=[[1, 2, 5]], dst_pages=[[3, 4, 6]])
    arguments = sides | pages | TOKENS | given(cp_ranks=[0])
    # Messages of links are those of their plans.
    return Call(transfer.plan_kv_links, arguments, prefixes=("plan_kv_transfer: ",), names=PAIRED)


def transfer_plan() -> Call:
    arguments = given(src=layout(), dst=layout(1 << 31), cp_rank=0) | PAGES | TOKENS
    return Call(transfer.plan_kv_transfer, arguments, names=PAIRED)


def sends(function: Callable[..., Any], *parts: Arguments, errors: Any = ()) -> Callable[[], Call]:
    about = {"errors": (IndexError, *errors), "names": BAG, "prefixes": SLICED}
    return lambda: Call(function, of_kind("bag", kv_args=kv_args()) | merged(parts), **about)


TARGETS = of_kind("addresses", dst_ptrs=[(1 << 31) + 4096 * i for i in range(4)]) | PAGES
send_kvcache = sends(
    sglang_0_5_23.plan_send_kvcache,
    TARGETS,
    given(pp_size=1, is_mla=True, is_last_rank=False, compat=False),
    of_kind("?addresses", dst_item_lens=[64] * 4),
)
send_slice = sends(
    sglang_0_5_23.plan_send_kvcache_slice,
    TARGETS,
    given(dst_tp_rank=0, dst_attn_tp_size=2, dst_kv_item_len=32, attn_tp_size=1, pp_size=1),
    given(is_last_rank=False, compat=False),
)
send_aux = sends(
    sglang_0_5_23.plan_send_aux,
    of_kind("addresses", dst_aux_ptrs=[1 << 22]),
    given(src_aux_index=3, dst_aux_index=2, compat=False),
    of_kind("?addresses", dst_item_lens=[16]),
)
send_state = sends(
    sglang_0_5_23.plan_send_state,
    of_kind("value", dst_state_ptrs=[[1 << 23]], src_state_indices=[[3]], dst_state_indices=[[2]]),
    of_kind("?value", dst_state_item_lens=[[32]], dst_state_layer_ids=[[]]),
    given(is_mla=False, attn_tp_size=1, dst_attn_tp_size=1, pp_size=1, kv_shard_rank=0),
    given(kv_shard_size=1, allow_dst_elision=False, compat=False),
    errors=(RuntimeError,),
)


def selected() -> Call:
    sender = sglang_0_5_23.KVSender(kv_shard_rank=1, kv_shard_size=2)
    found = sglang_0_5_23.plan_send_indices(sender, [8, 9, 11], curr_idx=0, num_kv_indices=3)
    return Call(found.select, given(dst_kv_indices=[5, 6, 7]))


def without_group(**attributes: Any) -> Any:
    """Return a `ContextParallel` that only plans, for which it needs no process group."""
    from cpattn import distributed  # needs torch

    cp = object.__new__(distributed.ContextParallel)
    vars(cp).update(attributes)
    return cp


def planned() -> Call:
    split = {"strategy": "zigzag", "weights": None, "whole_pages": False}
    cp = without_group(cp_rank=0, cp_size=2, page_size=4, **split)
    arguments = given(
        extend_lens=[4, 4], seq_lens=[7, 4], block_tables=[[1, 2], [3, -1]],
        out_cache_loc=[7, 8, 9, 10, 12, 13, 14, 15], num_tokens=8, pad_to_physical=False,
    ) | of_kind("any tensor", custom_mask=np.ones(44, bool))  # fmt: skip
    return Call(cp.plan, arguments, prefixes=("build_cp_metadata: ", "unshard: "))


def planned_decode() -> Call:
    placement = kv.PageInterleave(shard_size=2, page_size=4)
    cp = without_group(cp_rank=0, cp_size=2, page_size=4, placement=placement)
    arguments = given(kv_lens=[7, 4], block_tables=[[1, 2], [3, -1]], q_lens=[2, 1])
    arguments |= of_kind("any tensor", custom_mask=np.ones(18, bool))
    return Call(cp.plan_decode, arguments)


def sharded() -> Call:
    from cpattn.distributed.plans.plan import make_plan

    cp = without_group(_exchange=SimpleNamespace(rank=0, size=2))
    plan = make_plan(
        METADATA, [4, 4], block_tables=[[1, 2], [3, -1]], out_cache_loc=None, page_size=4,
        pad_to_physical=False,
    )  # fmt: skip
    arguments = given(plan=plan, dim=0) | of_kind("any tensor", x=f32(8, 2))
    return Call(cp.shard, arguments, prefixes=("ContextParallel.shard: ",))


def profiled() -> Call:
    with cpattn.profile(max_events=10) as profile:
        cpattn.sparse.hadamard_transform(f32(2, 16))
    scope = of_kind("value", scope=cpattn.profiling.TraceScope.call)
    return Call(profile.select, scope | given(thread=0))


def digested() -> Call:
    cache = np.zeros((8, 4, 2, 8), np.float16)
    side = transfer.KVLayout([transfer.KVEntry.from_tensor(0, "k", cache)], 4, total_kv_heads=2)
    arguments = (
        of_kind("value", layout=side)
        | of_kind("?value", peer=side)
        | given(pages=[1, 0], start=0, first_token=0, num_tokens=4, block_tokens=4, num_threads=1)
    )
    return Call(
        transfer.digest, arguments, close=lambda: cache.fill(0), prefixes=("KVLayout.from_pool: ",),
        names=("buffers", "addrs", "item_len", "pool"),
    )  # fmt: skip


def compared(name: str) -> Call:
    call = digested()
    mine = call.function(**call.values())
    errors = (transfer.KVMismatch,)
    return Call(
        getattr(mine, name), of_kind("value", sent=mine), close=call.close, errors=errors,
        prefixes=("KVDigest.differences: ",),
    )  # fmt: skip


def handshake() -> transfer.KVHandshake:
    return transfer.KVHandshake(layout(), {"model": "m"})


CALLS = {
    "LocalEngine.register": engine_register,
    "LocalEngine.unregister": engine_unregister,
    "LocalEngine.write": engine_write,
    "LocalEngine.differing": engine_differing,
    "register": register,
    "digest": digested,
    "KVDigest.check": partial(compared, "check"),
    "KVDigest.differences": partial(compared, "differences"),
    "KVDigest.from_dict": lambda: Call(
        transfer.KVDigest.from_dict,
        of_kind("value", fields=compared("check").values()["sent"].to_dict()),
    ),
    "KVHandshake": lambda: Call(
        transfer.KVHandshake,
        of_kind("value", layout=layout()) | of_kind("any", facts={"model": "m"}),
    ),
    "KVHandshake.check": method(
        handshake, "check", of_kind("value", peer=handshake()),
        prefixes=("KVHandshake.differences: ",),
    ),
    "KVHandshake.differences": method(handshake, "differences", of_kind("value", peer=handshake())),
    "KVHandshake.from_dict": of(
        transfer.KVHandshake.from_dict, of_kind("value", fields=handshake().to_dict()),
        prefixes=("KVLayout: ", "KVHandshake: ", "KVLayout.from_dict: "),
    ),
}  # fmt: skip
