# SPDX-License-Identifier: Apache-2.0
"""KV transfer with the names, lists and arguments of sglang 0.5.23, and its earlier rules.

``pages``       tokens to pages, pages to runs, and the part of a prompt that is sent when
``shards``      parts of ranks that hold every N-th page, or divide pages or layers
``sender``      choice among these parts for a rank, and the destination of its pages
``pointers``    pairs of source and destination buffers
``targets``     prefill ranks from which a decode rank pulls
``args``        `KVArgs`: a server's description of its buffers
``send``        plans of the senders: lists of buffers in, blocks to send out
``send_state``  plans of states and metadata, which follow the KV cache

Imports `cpattn.transfer`'s plans, and no sglang. With ``compat=True`` functions answer as sglang
does, bug for bug; without it, they answer correctly or raise ValueError. Start at ``send``;
`cpattn.transfer.plan_kv_transfer` plans for buffers that describe their contents.
"""

from .args import KVArgs, fill_kv_args, setup_state_kv_args
from .pages import (
    KVChunk,
    KVSendCursor,
    group_concurrent_contiguous,
    kv_to_page_indices,
    kv_to_page_num,
)
from .pointers import (
    DecodeTargets,
    build_transfer_entry_pairs,
    decode_targets,
    get_mha_kv_ptrs_with_pp,
    get_mla_kv_ptrs_with_pp,
    kv_start_layer,
)
from .send import HeadSlice, plan_send_kvcache, plan_send_kvcache_slice, slice_heads
from .send_state import plan_send_aux, plan_send_state
from .sender import KVSender, KVSendIndices, plan_send_indices
from .shards import (
    filter_kv_indices_for_cp_rank,
    filter_kv_indices_for_shard_rank,
    get_layer_owner,
    get_layer_shard_range,
    is_elided_entry,
)
from .targets import PullTargets, pull_targets

__all__ = [
    "DecodeTargets",
    "HeadSlice",
    "KVArgs",
    "KVChunk",
    "KVSendCursor",
    "KVSendIndices",
    "KVSender",
    "PullTargets",
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
    "plan_send_aux",
    "plan_send_indices",
    "plan_send_kvcache",
    "plan_send_kvcache_slice",
    "plan_send_state",
    "pull_targets",
    "setup_state_kv_args",
    "slice_heads",
]
