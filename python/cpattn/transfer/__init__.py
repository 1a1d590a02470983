# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between prefill and decode servers: what is sent, in which order.

    plan = plan_kv_transfer(KVLayout.from_pool(pool), peer_layout, src_pages, dst_pages)
    with register(engine, pool):
        plan.execute(engine, session)

``layout`` (with ``entry``, ``layout_sources``) says which layer, kind and tokens a buffer holds;
``planner`` makes plans of two layouts, ``plan`` is one, ``execute`` runs it. ``engine`` says what
moves bytes, ``local`` is one within a process; ``registration`` and ``regions`` are for memory
that engines may touch. ``wire`` has the messages between servers, ``sglang_0_5_23`` the functions
of that release under its names. Imports the core, and no engine (`cpattn.integrations`).
"""

from .engine import TransferEngine, TransferError, TransferStatus
from .layout import KVEntry, KVLayout
from .local import LocalEngine
from .plan import TransferPlan
from .planner import KVLink, KVLinks, plan_kv_links, plan_kv_transfer
from .regions import registration_regions
from .registration import Registration, register
from .sglang_0_5_23 import (
    DecodeTargets,
    HeadSlice,
    KVArgs,
    KVChunk,
    KVSendCursor,
    KVSender,
    KVSendIndices,
    PullTargets,
    build_transfer_entry_pairs,
    decode_targets,
    fill_kv_args,
    filter_kv_indices_for_cp_rank,
    filter_kv_indices_for_shard_rank,
    get_layer_owner,
    get_layer_shard_range,
    get_mha_kv_ptrs_with_pp,
    get_mla_kv_ptrs_with_pp,
    group_concurrent_contiguous,
    is_elided_entry,
    kv_start_layer,
    kv_to_page_indices,
    kv_to_page_num,
    plan_send_aux,
    plan_send_indices,
    plan_send_kvcache,
    plan_send_kvcache_slice,
    plan_send_state,
    pull_targets,
    setup_state_kv_args,
    slice_heads,
)
from .wire import KVRegistration, KVTransferRequest, pack_int_lists, unpack_int_lists

__all__ = [
    "DecodeTargets",
    "HeadSlice",
    "KVArgs",
    "KVChunk",
    "KVEntry",
    "KVLayout",
    "KVLink",
    "KVLinks",
    "KVRegistration",
    "KVSendCursor",
    "KVSendIndices",
    "KVSender",
    "KVTransferRequest",
    "LocalEngine",
    "PullTargets",
    "Registration",
    "TransferEngine",
    "TransferError",
    "TransferPlan",
    "TransferStatus",
    "build_transfer_entry_pairs",
    "decode_targets",
    "fill_kv_args",
    "filter_kv_indices_for_cp_rank",
    "filter_kv_indices_for_shard_rank",
    "get_layer_owner",
    "get_layer_shard_range",
    "get_mha_kv_ptrs_with_pp",
    "get_mla_kv_ptrs_with_pp",
    "group_concurrent_contiguous",
    "is_elided_entry",
    "kv_start_layer",
    "kv_to_page_indices",
    "kv_to_page_num",
    "pack_int_lists",
    "plan_kv_links",
    "plan_kv_transfer",
    "plan_send_aux",
    "plan_send_indices",
    "plan_send_kvcache",
    "plan_send_kvcache_slice",
    "plan_send_state",
    "pull_targets",
    "register",
    "registration_regions",
    "setup_state_kv_args",
    "slice_heads",
    "unpack_int_lists",
]
