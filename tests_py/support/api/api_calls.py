# SPDX-License-Identifier: Apache-2.0
"""A good call of every public callable that holds addresses or changes, with new arguments each
time; calls of functions that compute are in `argument_sweep`."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from cpattn import kv, transfer
from cpattn.transfer import sglang_0_5_23, wire
from support.api import argument_sweep, transfer_calls
from support.api.argument_kinds import Call, Target, f32, given, of_kind
from support.api.transfer_calls import BAG, FILTERS, kv_args, layout, method, of

POOL = given(size=16, page_size=4, num_layers=2)
POOL_OPTIONS = given(start_layer=0, use_fia=False, container="numpy")
BUFFERS = ("buffer", "elements", "slots")
SIZES = {"size": 16, "page_size": 4, "num_layers": 2, "container": "numpy"}
HEADS = {"num_kv_heads": 2, "head_dim": 8}
mha_pool = functools.partial(kv.MHATokenToKVPool, **SIZES, **HEADS, dtype="float32")
mla_pool = functools.partial(
    kv.MLATokenToKVPool, **SIZES, kv_lora_rank=16, qk_rope_head_dim=8, index_head_dim=8,
    dtype="float32",
)  # fmt: skip
scaled_pool = functools.partial(
    kv.MHATokenToKVPool, **SIZES, **HEADS, dtype="int8", scale_dtype="float32"
)
dsa_pool = functools.partial(kv.DSATokenToKVPool, **SIZES, index_head_dim=128)
pages = functools.partial(kv.PageInterleave, shard_size=2, page_size=4)
tokens = functools.partial(kv.TokenInterleave, shard_size=2, interleave=4)


def allocator() -> kv.StripedAllocator:
    made = kv.StripedAllocator(16, page_size=4, shard_size=2)
    made.alloc_cyclic(0, 12)
    return made


def gather() -> kv.ShardGatherPlan:
    return kv.plan_shard_gather(
        [list(range(8, 20))], None, [8], [10], placement=pages(), size=16, max_prefix_tokens=16,
        chunk_tokens=8,
    )  # fmt: skip


def filled(function: Callable[..., None], pool: Callable[[], object]) -> Call:
    kv_args, pools = sglang_0_5_23.KVArgs(), {"pool": pool(), "draft_pool": pool()}
    return Call(function, given(kv_args=kv_args, total_kv_layers=2, **pools))


GROUPED = ("source", "destination", "number of layers")
POINTERS = of_kind("list", src_kv_ptrs=[10, 11, 12, 13], dst_kv_ptrs=[20, 21, 22, 23]) | given(
    prefill_start_layer=0, total_kv_layers=2, compat=False
)
LAYOUT = (
    "buffer", "page", "layer", "heads", "rank", "entries", "kind", "is_draft", "addr", "nbytes",
    "item_len", "token_rows", "dtype", "kv_layout", "layout_tag", "dcp", "tp_", "shard_",
    "argument",
)  # fmt: skip
INTERLEAVE = given(dcp_interleave=1, shard_rank=0, shard_size=1)
DCP = given(dcp_rank=0, dcp_size=1) | INTERLEAVE
LAYOUTS = {"prefixes": ("KVLayout: ",)}
ROWS = given(layer_id=1, loc=[1, 6])
LAYER = given(layer_id=1)
K_V = {"names": ("k ", "v ")}
SLOTS, LENS = of_kind("ints", slots=[8, 12, -1]), of_kind("lens", seq_lens=[9, 0])
POSITIONS = given(positions=[8, 12, -1])
MOVED = of_kind("list", caches=[f32(8, 1, 2)])
SLICE = of_kind("value", index_slice=slice(2, 5))
KV_INDICES = given(kv_indices=[8, 9, 11])
TP = given(engine_rank=3, prefill_tp_size=8, decode_tp_size=4, is_mla=True)

GETTERS = ("key", "value", "index_k", "key_scale", "value_scale")
PLACEMENTS = {
    f"{make.func.__name__}.{name}": method(make, name, *arguments)
    for make, of_all in ((pages, SLOTS), (tokens, POSITIONS))
    for name, arguments in {
        "owner_of": (of_all,), "local_index": (of_all,), "filter_local": (of_all, given(rank=1)),
        "global_index": (given(rank=1, local=[4, 5, -1]),),
    }.items()
}  # fmt: skip

TRANSFERS: dict[str, Callable[[], Call]] = {
    "plan_kv_links": transfer_calls.links,
    "plan_kv_transfer": transfer_calls.transfer_plan,
    "plan_send_kvcache": transfer_calls.send_kvcache,
    "plan_send_kvcache_slice": transfer_calls.send_slice,
    "plan_send_aux": transfer_calls.send_aux,
    "plan_send_state": transfer_calls.send_state,
    "slice_heads": of(
        sglang_0_5_23.slice_heads,
        given(total_kv_heads=4, prefill_tp_size=8, prefill_rank=7, decode_tp_size=2),
        given(decode_rank=1, compat=False),
        names=("rank", "sizes", "heads"),
    ),
    "plan_send_indices": of(
        sglang_0_5_23.plan_send_indices,
        given(sender=sglang_0_5_23.KVSender(kv_shard_rank=1, kv_shard_size=2), compat=False),
        KV_INDICES,
        given(curr_idx=2, num_kv_indices=5),
        names=("pages",),
        prefixes=FILTERS,
    ),
    "KVSendIndices.select": transfer_calls.selected,
    "filter_kv_indices_for_cp_rank": of(
        sglang_0_5_23.filter_kv_indices_for_cp_rank,
        given(kv_mgr=sglang_0_5_23.KVSender(1, 2), total_pages=5),
        KV_INDICES,
        SLICE,
        names=("pages", "attn_cp_rank"),
    ),
    "filter_kv_indices_for_shard_rank": of(
        sglang_0_5_23.filter_kv_indices_for_shard_rank,
        KV_INDICES,
        SLICE,
        given(shard_rank=1, shard_size=2),
        names=("pages",),
    ),
    "KVSender": of(
        sglang_0_5_23.KVSender,
        given(attn_cp_rank=1, attn_cp_size=2, kv_shard_rank=0, kv_shard_size=1),
        given(enable_dsa_cache_layer_split=False, all_cp_ranks_transfer=True),
        given(is_hybrid_mla_backend=False, enable_cp_tp_group_sharing=False),
    ),
    "get_layer_shard_range": of(
        sglang_0_5_23.get_layer_shard_range, given(rank=1, shard_size=3, total_layers=7)
    ),
    "get_layer_owner": of(
        sglang_0_5_23.get_layer_owner, given(local_layer_idx=4, shard_size=3, total_layers=7)
    ),
    "is_elided_entry": of(
        sglang_0_5_23.is_elided_entry,
        given(src_len=64, dst_index=1, allow_dst_elision=True),
        of_kind("?ints", dst_lens=[64, 0]),
    ),
    "pull_targets": of(
        sglang_0_5_23.pull_targets,
        TP,
        given(prefill_cp_size=1, decode_cp_size=1, prefill_pp_size=2, decode_pp_size=1, pp_rank=0),
        given(decode_dcp_size=1, enable_kv_cache_sharding=False),
        given(enable_dsa_cache_layer_split=False, enable_all_cp_ranks_for_transfer=True),
    ),
    "decode_targets": of(sglang_0_5_23.decode_targets, TP),
    "kv_start_layer": of(
        sglang_0_5_23.kv_start_layer, given(start_layer=30, kv_layer_ids=[3, 7, 31])
    ),
    "build_transfer_entry_pairs": of(
        sglang_0_5_23.build_transfer_entry_pairs,
        of_kind("?ints", src_layer_ids=[3, 7], dst_layer_ids=[3, 7, 11]),
        given(n_src=2, n_dst=3, allow_positional_fallback=False),
        errors=(RuntimeError,),  # engines word these errors
        prefixes=("Layer metadata", "PP-heterogeneous", "Decode peer"),
        names=("Layer metadata", "entries", "layer"),
    ),
    "get_mha_kv_ptrs_with_pp": of(sglang_0_5_23.get_mha_kv_ptrs_with_pp, POINTERS, names=GROUPED),
    "get_mla_kv_ptrs_with_pp": of(
        sglang_0_5_23.get_mla_kv_ptrs_with_pp,
        POINTERS,
        given(kv_buf_groups=2, hidden_kv_layers=2, draft_kv_layers=0, is_last_rank=False),
        of_kind("?int", num_draft_entries=None),
        names=GROUPED,
    ),
    "kv_to_page_num": of(sglang_0_5_23.kv_to_page_num, given(num_tokens=9, page_size=4)),
    "kv_to_page_indices": of(
        sglang_0_5_23.kv_to_page_indices,
        given(kv_indices=[12, 13, 14, 15, 4], page_size=4),
        names=("pages",),
    ),
    "group_concurrent_contiguous": of(
        sglang_0_5_23.group_concurrent_contiguous,
        given(src_indices=[2, 3, 7], dst_indices=[20, 21, 40]),
        names=("index arrays",),
    ),
    "registration_regions": of(
        transfer.registration_regions,
        of_kind("addresses", ptrs=[4096, 8192, 4096], lens=[64, 0, 64]),
        given(alignment=1),
    ),
    "TransferPlan": of(
        transfer.TransferPlan,
        of_kind("addresses", src_addrs=[0, 64], dst_addrs=[4096, 8192], lengths=[64, 192]),
        of_kind("value", parts=[("k", 1, 1), ("v", 1, 1)]),
    ),
    "TransferPlan.execute": transfer_calls.execute,
    "KVLayout": of(
        transfer.KVLayout,
        of_kind("value", entries=[transfer.KVEntry(0, "k", False, 1 << 48, 4608, 512)]),
        given(page_size=8, tp_rank=0, tp_size=1, total_kv_heads=1, layers=(0, 1)),
        DCP,
        names=LAYOUT,
    ),
    "KVLayout.from_pool": lambda: Call(
        transfer.KVLayout.from_pool,
        given(pool=mha_pool(), draft_pool=mha_pool(), tp_rank=0, tp_size=1, total_kv_heads=2)
        | given(layers=(0, 2))
        | DCP,
        names=("buffer", "page", "layer", "heads", "rank"),
        **LAYOUTS,
    ),
    "KVLayout.from_kv_args": of(
        transfer.KVLayout.from_kv_args,
        of_kind("bag", kv_args=kv_args()),
        given(is_mla=False, tp_size=1, total_layers=2, draft_layers=0, layers=(0, 2)),
        INTERLEAVE,
        names=(*BAG, *LAYOUT),
        **LAYOUTS,
    ),
    "KVLayout.from_dict": of(
        transfer.KVLayout.from_dict,
        of_kind("bag", fields=layout().to_dict()),
        names=LAYOUT,
        prefixes=("KVLayout: ", "KVLayout.__init__()"),
    ),
    "KVSendCursor": of(
        sglang_0_5_23.KVSendCursor,
        given(num_tokens=10, page_size=4, decode_prefix_len=4, compat=False),
    ),
    "KVSendCursor.advance": method(
        lambda: sglang_0_5_23.KVSendCursor(10, 4),
        "advance",
        given(num_computed=6, last_chunk=False),
        of_kind("?int", end=None),
    ),
    "KVChunk.select": method(
        lambda: sglang_0_5_23.KVChunk(4, 12, 1, 3, False, 4),
        "select",
        given(kv_indices=list(range(16)), dst_page_indices=[5, 6, 7, 8]),
        names=("pages",),
        prefixes=("kv_to_page_indices: ",),
    ),
    "MHATokenToKVPool": of(
        kv.MHATokenToKVPool,
        POOL | POOL_OPTIONS,
        of_kind("dtype", dtype="int8"),
        of_kind("?dtype", scale_dtype="float16"),
        given(num_kv_heads=2, head_dim=8, v_head_dim=8),
        names=BUFFERS,
    ),
    "NumaMemory": of(kv.NumaMemory, of_kind("?ints", nodes=[0]), names=("nodes",)),
    "MLATokenToKVPool": of(
        kv.MLATokenToKVPool,
        POOL | POOL_OPTIONS,
        of_kind("dtype", dtype="float32"),
        given(kv_lora_rank=16, qk_rope_head_dim=8, index_head_dim=8),
        names=BUFFERS,
    ),
    "DSATokenToKVPool": of(
        kv.DSATokenToKVPool,
        POOL,
        given(index_head_dim=128, start_layer=0, container="numpy"),
        names=BUFFERS,
    ),
    "set_kv_buffer": method(
        mha_pool,
        "set_kv_buffer",
        ROWS,
        given(k=f32(2, 2, 8), v=f32(2, 2, 8)),
        of_kind("?float", k_scale=1.0, v_scale=1.0),
        **K_V,
    ),
    "set_kv_buffer#codes": method(
        scaled_pool,
        "set_kv_buffer",
        ROWS,
        of_kind("tensor", k=np.ones((2, 2, 8), np.int8), v=np.ones((2, 2, 8), np.int8)),
        of_kind("tensor", k_scale=f32(2, 2), v_scale=f32(2, 2)),
        **K_V,
    ),
    "set_kv_buffer#DSA": method(
        dsa_pool,
        "set_kv_buffer",
        ROWS,
        given(k=f32(2, 512), v=f32(2, 64)),
        names=("k ", "nope", "rope"),
        prefixes=("quantize_kv_rows: ",),
    ),
    "set_index_k_buffer#DSA": method(
        dsa_pool,
        "set_index_k_buffer",
        ROWS,
        given(index_k=f32(2, 128)),
        of_kind("?tensor", k_scale=None),
        names=("slots", "k "),
        prefixes=("write_index_k_cache: ",),
    ),
    "set_kv_buffer#MLA": method(
        mla_pool,
        "set_kv_buffer",
        ROWS,
        given(k=f32(2, 1, 16)),
        of_kind("?tensor", v=f32(2, 1, 8)),
        **K_V,
    ),
    "set_index_k_buffer": method(mla_pool, "set_index_k_buffer", ROWS, given(index_k=f32(2, 1, 8))),
    "get_index_k_buffer#DSA": method(dsa_pool, "get_index_k_buffer", LAYER),
    **{
        name: method(mla_pool if "scale" not in name else scaled_pool, name, LAYER)
        for name in (f"get_{of}_buffer" for of in GETTERS)
    },
    "get_key_buffer#get_kv_buffer": method(
        mha_pool, "get_kv_buffer", LAYER, prefixes=("get_value_buffer: ",)
    ),
    "LocalEngine": of(transfer.LocalEngine, given(num_threads=1, max_blocks=16)),
    **transfer_calls.CALLS,
    "Registration.close": transfer_calls.closed_registration,
    "fill_kv_args": lambda: filled(sglang_0_5_23.fill_kv_args, mha_pool),
    "setup_state_kv_args": lambda: filled(sglang_0_5_23.setup_state_kv_args, mla_pool),
    "pack_int_lists": of(
        wire.pack_int_lists,
        of_kind("value", lists=[[7], [], [8, 9]]),
        given(fmt="I"),
        names=("list",),
    ),
    "unpack_int_lists": of(
        wire.unpack_int_lists,
        of_kind("frame", buf=wire.pack_int_lists([[7], [], [8, 9]], "I")),
        given(fmt="I"),
        names=("list",),
    ),
    "KVRegistration.from_frames": of(
        wire.KVRegistration.from_frames,
        of_kind("frames", frames=transfer_calls.registration_message().to_frames()),
        names=("frame",),
    ),
    "ContextParallel.plan": transfer_calls.planned,
    "ContextParallel.plan_decode": transfer_calls.planned_decode,
    "shard#ContextParallel": transfer_calls.sharded,
    "select": transfer_calls.profiled,
    **PLACEMENTS,
    "PageInterleave": of(kv.PageInterleave, given(shard_size=2, page_size=4)),
    "PageInterleave.num_local_slots": method(pages, "num_local_slots", given(num_slots=9)),
    "TokenInterleave": of(kv.TokenInterleave, given(shard_size=2, interleave=4)),
    "TokenInterleave.local_lens": method(tokens, "local_lens", LENS, given(rank=1)),
    "StripedAllocator": of(
        kv.StripedAllocator, given(size=16, page_size=4, shard_size=2, need_sort=False)
    ),
    "StripedAllocator.alloc_extend": method(
        allocator,
        "alloc_extend",
        given(prefix_lens=[0, 8], seq_lens=[3, 9]),
        of_kind("value", rotation_bases=[None, 1]),
    ),
    "StripedAllocator.alloc_cyclic": method(
        allocator, "alloc_cyclic", given(start_class=1, num_slots=5)
    ),
    "StripedAllocator.free": method(allocator, "free", given(slots=[8, 12])),
    "ShardGatherPlan.translate": method(gather, "translate", SLOTS),
    "ShardGatherPlan.write_plan": method(gather, "write_plan", SLOTS, of_kind("int", rank=1)),
    "write_pages": of(
        kv.write_pages,
        given(slots=[5, -1], k=f32(2, 1, 4), k_pages=f32(2, 4, 1, 4), k_scale=1.0),
        given(v=f32(2, 1, 4), v_pages=f32(2, 4, 1, 4), v_scale=2.0, kv_layout="NHD"),
    ),
    "move_rows": of(kv.move_rows, given(sources=[5], targets=[0], kv_layout="NHD"), MOVED),
    "plan_shard_gather": of(
        kv.plan_shard_gather,
        of_kind("table", req_to_token=[list(range(8, 20))]),
        given(req_pool_indices=[0], prefix_lens=[8], seq_lens=[10], placement=pages()),
        given(size=16, max_prefix_tokens=16, chunk_tokens=8),
    ),
}

TABLES = (
    "heads", "page_size", "num_pages", "page table", "page ids", "head_dim", "indices", "lengths",
    "columns", "queries", "rows",
)  # fmt: skip

# Engines word these errors, as the documentation says.
ENGINES = {
    "topk_transform": {"errors": (RuntimeError,), "prefixes": ("RAGGED topk_transform requires",)}
}
# The fuzzer's scales are too large for float16: results above 65504 are infinite. Scores of blocks
# that are always selected are infinite, too.
UNJUDGED = {"hadamard_transform", "select_blocks"}


def targets() -> Iterator[Target]:
    for call in argument_sweep.CALLS:
        make = functools.partial(replace, call, names=TABLES, **ENGINES.get(call.name, {}))
        yield Target(call.name, make, judged=call.name not in UNJUDGED)
    for name, make in TRANSFERS.items():
        yield Target(name.partition("#")[0], make)
