# SPDX-License-Identifier: Apache-2.0
"""A good call of every public callable, made anew each time, for `api_fuzz`.

Functions that compute have theirs in `argument_sweep`; here are those of transfers, pools and
plans, which have to be made anew because they hold addresses or change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import cpattn
from cpattn import transfer
from cpattn.transfer import wire
from support.api import argument_sweep
from support.api.api_call_kinds import Arguments, Good, Target
from support.api.pool_calls import (
    dsa_pool,
    mha_pool,
    mla_pool,
    scaled_pool,
    set_codes,
    set_dsa_index_k,
    set_dsa_rows,
    set_index_k,
    set_kv,
    set_latent,
)
from support.api.shard_calls import SHARDED, cp_share, shard_share
from support.api.transfer_calls import (
    BAG,
    chunk,
    closed_registration,
    cursor,
    engine_register,
    engine_unregister,
    engine_write,
    execute,
    kv_args,
    layout,
    links,
    method,
    of,
    planned,
    planned_decode,
    pointers,
    profiled,
    register,
    registration_message,
    selected,
    send_aux,
    send_indices,
    send_kvcache,
    send_slice,
    send_state,
    sharded,
    transfer_plan,
)

GROUPED = ("source", "destination", "number of layers")

LAYOUT = (
    "buffer", "page", "layer", "heads", "rank", "entries", "kind", "is_draft", "addr", "nbytes",
    "item_len", "token_rows", "dtype", "dcp", "tp_", "shard_", "argument",
)  # fmt: skip
POOL_SIZES: Arguments = {
    "size": ("int", 16),
    "page_size": ("int", 4),
    "num_layers": ("int", 2),
    "dtype": ("dtype", "float32"),
    "start_layer": ("int", 0),
    "use_fia": ("?flag", False),
    "container": ("?text", "numpy"),
}
TRANSFERS: dict[str, Callable[[], Good]] = {
    "plan_kv_links": links,
    "plan_kv_transfer": transfer_plan,
    "plan_send_kvcache": send_kvcache,
    "plan_send_kvcache_slice": send_slice,
    "plan_send_aux": send_aux,
    "plan_send_state": send_state,
    "slice_heads": of(
        transfer.slice_heads,
        total_kv_heads=("int", 4), prefill_tp_size=("int", 8), prefill_rank=("int", 7),
        decode_tp_size=("int", 2), decode_rank=("int", 1), compat=("flag", False),
        names=("rank", "sizes", "heads"),
    ),
    "plan_send_indices": send_indices,
    "KVSendIndices.select": selected,
    "filter_kv_indices_for_cp_rank": cp_share,
    "filter_kv_indices_for_shard_rank": shard_share,
    "KVSender": of(
        transfer.KVSender,
        attn_cp_rank=("int", 1), attn_cp_size=("int", 2), kv_shard_rank=("int", 0),
        kv_shard_size=("int", 1), enable_dsa_cache_layer_split=("flag", False),
        all_cp_ranks_transfer=("flag", True), is_hybrid_mla_backend=("flag", False),
        enable_cp_tp_group_sharing=("flag", False),
    ),
    "get_layer_shard_range": of(
        transfer.get_layer_shard_range,
        rank=("int", 1), shard_size=("int", 3), total_layers=("int", 7),
    ),
    "get_layer_owner": of(
        transfer.get_layer_owner,
        local_layer_idx=("int", 4), shard_size=("int", 3), total_layers=("int", 7),
    ),
    "is_elided_entry": of(
        transfer.is_elided_entry,
        src_len=("int", 64), dst_lens=("?ints", [64, 0]), dst_index=("int", 1),
        allow_dst_elision=("flag", True),
    ),
    "pull_targets": of(
        transfer.pull_targets,
        engine_rank=("int", 3), prefill_tp_size=("int", 8), decode_tp_size=("int", 4),
        is_mla=("flag", True), prefill_cp_size=("int", 1), decode_cp_size=("int", 1),
        prefill_pp_size=("int", 2), decode_pp_size=("int", 1), pp_rank=("int", 0),
        decode_dcp_size=("int", 1), enable_kv_cache_sharding=("flag", False),
        enable_dsa_cache_layer_split=("flag", False),
        enable_all_cp_ranks_for_transfer=("flag", True),
    ),
    "decode_targets": of(
        transfer.decode_targets,
        engine_rank=("int", 3), prefill_tp_size=("int", 8), decode_tp_size=("int", 4),
        is_mla=("flag", True),
    ),
    "kv_start_layer": of(
        transfer.kv_start_layer, start_layer=("int", 30), kv_layer_ids=("ints", [3, 7, 31])
    ),
    "build_transfer_entry_pairs": lambda: Good(
        transfer.build_transfer_entry_pairs,
        {
            "src_layer_ids": ("?ints", [3, 7]),
            "dst_layer_ids": ("?ints", [3, 7, 11]),
            "n_src": ("int", 2),
            "n_dst": ("int", 3),
            "allow_positional_fallback": ("flag", False),
        },
        errors=(RuntimeError,),  # in the words of engines
        prefixes=("Layer metadata", "PP-heterogeneous", "Decode peer"),
        names=("Layer metadata", "entries", "layer"),
    ),
    "get_mha_kv_ptrs_with_pp": lambda: Good(
        transfer.get_mha_kv_ptrs_with_pp, pointers(), names=GROUPED
    ),
    "get_mla_kv_ptrs_with_pp": lambda: Good(
        transfer.get_mla_kv_ptrs_with_pp,
        {
            **pointers(),
            "kv_buf_groups": ("int", 2),
            "hidden_kv_layers": ("?int", 2),
            "draft_kv_layers": ("int", 0),
            "is_last_rank": ("flag", False),
            "num_draft_entries": ("?int", None),
        },
        names=GROUPED,
    ),
    "kv_to_page_num": of(transfer.kv_to_page_num, num_tokens=("int", 9), page_size=("int", 4)),
    "kv_to_page_indices": of(
        transfer.kv_to_page_indices, names=("pages",), kv_indices=("ints", [12, 13, 14, 15, 4]),
        page_size=("int", 4),
    ),
    "group_concurrent_contiguous": of(
        transfer.group_concurrent_contiguous,
        names=("index arrays",),
        src_indices=("ints", [2, 3, 7]), dst_indices=("ints", [20, 21, 40]),
    ),
    "registration_regions": of(
        transfer.registration_regions,
        ptrs=("addresses", [4096, 8192, 4096]), lens=("addresses", [64, 0, 64]),
        alignment=("int", 1),
    ),
    "TransferPlan": of(
        transfer.TransferPlan,
        src_addrs=("addresses", [0, 64]), dst_addrs=("addresses", [4096, 8192]),
        lengths=("addresses", [64, 192]), parts=("value", [("k", 1, 1), ("v", 1, 1)]),
    ),
    "TransferPlan.execute": execute,
    "KVLayout": of(
        transfer.KVLayout,
        entries=("value", [transfer.KVEntry(0, "k", False, 1 << 48, 4608, 512)]),
        page_size=("int", 8), tp_rank=("int", 0), tp_size=("int", 1),
        total_kv_heads=("?int", 1), layers=("?value", (0, 1)), dcp_rank=("int", 0),
        dcp_size=("int", 1), dcp_interleave=("int", 1), shard_rank=("int", 0),
        shard_size=("int", 1), names=LAYOUT,
    ),
    "KVLayout.from_pool": lambda: Good(
        transfer.KVLayout.from_pool,
        {
            "pool": ("value", mha_pool()),
            "draft_pool": ("?value", mha_pool()),
            "tp_rank": ("int", 0),
            "tp_size": ("int", 1),
            "total_kv_heads": ("?int", 2),
            "layers": ("?value", (0, 2)),
            "dcp_rank": ("int", 0),
            "dcp_size": ("int", 1),
            "dcp_interleave": ("int", 1),
            "shard_rank": ("int", 0),
            "shard_size": ("int", 1),
        },
        prefixes=("KVLayout: ",),
        names=("buffer", "page", "layer", "heads", "rank"),
    ),
    "KVLayout.from_kv_args": lambda: Good(
        transfer.KVLayout.from_kv_args,
        {
            "kv_args": ("bag", kv_args()),
            "is_mla": ("flag", False),
            "tp_size": ("int", 1),
            "total_layers": ("?int", 2),
            "draft_layers": ("?int", 0),
            "layers": ("?value", (0, 2)),
            "dcp_interleave": ("int", 1),
            "shard_rank": ("int", 0),
            "shard_size": ("int", 1),
        },
        prefixes=("KVLayout: ",),
        names=(*BAG, *LAYOUT),
    ),
    "KVLayout.from_dict": lambda: Good(
        transfer.KVLayout.from_dict, {"fields": ("bag", layout().to_dict())},
        names=LAYOUT, prefixes=("KVLayout: ", "KVLayout.__init__()"),
    ),
    "KVSendCursor": of(
        transfer.KVSendCursor,
        num_tokens=("int", 10), page_size=("int", 4), decode_prefix_len=("int", 4),
        compat=("flag", False),
    ),
    "KVSendCursor.advance": cursor,
    "KVChunk.select": chunk,
    "MHATokenToKVPool": of(
        cpattn.kv.MHATokenToKVPool,
        **{**POOL_SIZES, "dtype": ("dtype", "int8")}, num_kv_heads=("int", 2),
        head_dim=("int", 8), v_head_dim=("?int", 8), scale_dtype=("dtype", "float16"),
        names=("buffer", "elements", "slots"),
    ),
    "MLATokenToKVPool": of(
        cpattn.kv.MLATokenToKVPool,
        **POOL_SIZES, kv_lora_rank=("int", 16), qk_rope_head_dim=("int", 8),
        index_head_dim=("?int", 8), names=("buffer", "elements", "slots"),
    ),
    "DSATokenToKVPool": of(
        cpattn.kv.DSATokenToKVPool,
        size=("int", 16), page_size=("int", 4), num_layers=("int", 2),
        index_head_dim=("?int", 128), start_layer=("int", 0), container=("?text", "numpy"),
        names=("buffer", "elements", "slots"),
    ),
    "set_kv_buffer": set_kv,
    "set_kv_buffer#codes": set_codes,
    "set_kv_buffer#DSA": set_dsa_rows,
    "set_index_k_buffer#DSA": set_dsa_index_k,
    "get_index_k_buffer#DSA": functools.partial(
        lambda: method(dsa_pool, "get_index_k_buffer", layer_id=("int", 1))()
    ),
    **{
        name: functools.partial(lambda name: method(scaled_pool, name, layer_id=("int", 1))(), name)
        for name in ("get_key_scale_buffer", "get_value_scale_buffer")
    },
    "set_kv_buffer#MLA": set_latent,
    "set_index_k_buffer": set_index_k,
    **{
        name: functools.partial(lambda name: method(mla_pool, name, layer_id=("int", 1))(), name)
        for name in ("get_key_buffer", "get_value_buffer", "get_index_k_buffer")
    },
    "get_key_buffer#get_kv_buffer": lambda: Good(
        mha_pool().get_kv_buffer, {"layer_id": ("int", 1)}, prefixes=("get_value_buffer: ",)
    ),
    "LocalEngine": of(
        transfer.LocalEngine, num_threads=("?int", 1), max_blocks=("int", 16)
    ),
    "LocalEngine.register": engine_register,
    "LocalEngine.unregister": engine_unregister,
    "LocalEngine.write": engine_write,
    "register": register,
    "Registration.close": closed_registration,
    "fill_kv_args": lambda: Good(
        transfer.fill_kv_args,
        {
            "kv_args": ("value", transfer.KVArgs()),
            "pool": ("value", mha_pool()),
            "draft_pool": ("?value", mha_pool()),
            "total_kv_layers": ("?int", 2),
        },
    ),
    "setup_state_kv_args": lambda: Good(
        transfer.setup_state_kv_args,
        {
            "kv_args": ("value", transfer.KVArgs()),
            "pool": ("value", mla_pool()),
            "draft_pool": ("?value", mla_pool()),
            "total_kv_layers": ("int", 2),
        },
    ),
    "pack_int_lists": of(
        wire.pack_int_lists, lists=("value", [[7], [], [8, 9]]), fmt=("text", "I"), names=("list",)
    ),
    "unpack_int_lists": of(
        wire.unpack_int_lists,
        buf=("frame", wire.pack_int_lists([[7], [], [8, 9]], "I")), fmt=("text", "I"),
        names=("list",),
    ),
    "KVRegistration.from_frames": lambda: Good(
        wire.KVRegistration.from_frames,
        {"frames": ("frames", registration_message().to_frames())}, names=("frame",),
    ),
    "ContextParallel.plan": planned,
    "ContextParallel.plan_decode": planned_decode,
    "shard#ContextParallel": sharded,
    "select": profiled,
}  # fmt: skip

TABLES = (
    "heads",
    "page_size",
    "num_pages",
    "page table",
    "page ids",
    "head_dim",
    "indices",
    "lengths",
    "columns",
    "queries",
    "rows",
)

# In the words of engines, as its documentation says.
ENGINES = {
    "topk_transform": {"errors": (RuntimeError,), "prefixes": ("RAGGED topk_transform requires",)},
}
# For float16 the fuzzer's scales are too large: results beyond 65504 are infinite.
UNJUDGED = {"hadamard_transform"}


def targets() -> Iterator[Target]:
    """All of them."""
    for call in argument_sweep.CALLS:
        arguments = {name: (kind, value) for name, (kind, value) in call.arguments.items()}
        options = {"names": TABLES} | ENGINES.get(call.name, {})
        make = functools.partial(Good, call.function, arguments, **options)
        yield Target(call.name, make, judged=call.name not in UNJUDGED)
    for name, make in (TRANSFERS | SHARDED).items():
        yield Target(name.partition("#")[0], make)
