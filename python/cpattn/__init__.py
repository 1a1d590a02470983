# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention for LLM serving on CPU: plans, paged kernels and oracles."""

from importlib import import_module
from types import ModuleType

from . import _values as _values
from . import reference
from ._core import (
    AttentionPlan,
    TraceScope,
    __version__,
    active_isa,
    set_num_threads,
    supported_isas,
)
from .attention import (
    do_cp_attn_fia,
    merge_state,
    paged_attention,
    plan_attention,
    run_attention,
)
from .context_parallel import (
    ContextParallelMetadata,
    ForwardMode,
    build_cp_metadata,
    build_cp_metadata_all_ranks,
    can_apply_cp,
    can_dsa_prefill_cp_interleave,
)
from .cp_indexer import cp_indexer_topk, dcp_local_indices
from .dsa_metadata import DsaMetadata, build_dsa_metadata
from .fia import npu_fused_infer_attention_score
from .index_k import (
    hadamard_transform,
    quantize_index,
    read_index_k_cache,
    write_index_k_cache,
)
from .indexer import indexer_logits, indexer_topk
from .kv_pool import MHATokenToKVPool, MLATokenToKVPool
from .kv_rows import dequantize_kv_rows, quantize_kv_rows, quantize_kv_rows_separate
from .lightning_indexer import npu_lightning_indexer
from .profiling import Profile, profile
from .sparse_flash_attention import npu_sparse_flash_attention
from .sparse_mla import flash_mla_sparse_fwd
from .split_norm import (
    can_fuse_split_qk_norm,
    dsa_use_prefill_cp,
    fused_split_qk_norm,
    split_qk_norm,
)
from .topk import (
    TopkTransformMethod,
    fast_topk,
    fast_topk_transform_fused,
    fast_topk_transform_ragged_fused,
    get_topk_transform_method,
    pad_topk_indices,
    page_table_to_topk,
    topk_transform,
    transform_index_page_table_decode,
    transform_index_page_table_prefill,
)
from .transfer.args import KVArgs, fill_kv_args, setup_state_kv_args
from .transfer.engine import TransferEngine, TransferError, TransferStatus
from .transfer.layout import KVEntry, KVLayout
from .transfer.local import LocalEngine
from .transfer.pages import (
    KVChunk,
    KVSendCursor,
    group_concurrent_contiguous,
    kv_to_page_indices,
    kv_to_page_num,
)
from .transfer.plan import TransferPlan
from .transfer.planner import plan_kv_links, plan_kv_transfer
from .transfer.pointers import (
    DecodeTargets,
    build_transfer_entry_pairs,
    decode_targets,
    get_mha_kv_ptrs_with_pp,
    get_mla_kv_ptrs_with_pp,
    kv_start_layer,
)
from .transfer.regions import registration_regions
from .transfer.send import (
    HeadSlice,
    plan_send_aux,
    plan_send_kvcache,
    plan_send_kvcache_slice,
    plan_send_state,
    slice_heads,
)

__all__ = [
    "AttentionPlan",
    "ContextParallelMetadata",
    "DecodeTargets",
    "DsaMetadata",
    "ForwardMode",
    "HeadSlice",
    "KVArgs",
    "KVChunk",
    "KVEntry",
    "KVLayout",
    "KVSendCursor",
    "LocalEngine",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "Profile",
    "TopkTransformMethod",
    "TraceScope",
    "TransferEngine",
    "TransferError",
    "TransferPlan",
    "TransferStatus",
    "__version__",
    "active_isa",
    "build_cp_metadata",
    "build_cp_metadata_all_ranks",
    "build_dsa_metadata",
    "build_transfer_entry_pairs",
    "can_apply_cp",
    "can_dsa_prefill_cp_interleave",
    "can_fuse_split_qk_norm",
    "cp_indexer_topk",
    "dcp_local_indices",
    "decode_targets",
    "dequantize_kv_rows",
    "do_cp_attn_fia",
    "dsa_use_prefill_cp",
    "fast_topk",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fill_kv_args",
    "flash_mla_sparse_fwd",
    "fused_split_qk_norm",
    "get_mha_kv_ptrs_with_pp",
    "get_mla_kv_ptrs_with_pp",
    "get_topk_transform_method",
    "group_concurrent_contiguous",
    "hadamard_transform",
    "indexer_logits",
    "indexer_topk",
    "kv_start_layer",
    "kv_to_page_indices",
    "kv_to_page_num",
    "merge_state",
    "npu_fused_infer_attention_score",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "pad_topk_indices",
    "page_table_to_topk",
    "paged_attention",
    "plan_attention",
    "plan_kv_links",
    "plan_kv_transfer",
    "plan_send_aux",
    "plan_send_kvcache",
    "plan_send_kvcache_slice",
    "plan_send_state",
    "profile",
    "quantize_index",
    "quantize_kv_rows",
    "quantize_kv_rows_separate",
    "read_index_k_cache",
    "reference",
    "registration_regions",
    "run_attention",
    "set_num_threads",
    "setup_state_kv_args",
    "slice_heads",
    "split_qk_norm",
    "supported_isas",
    "topk_transform",
    "transform_index_page_table_decode",
    "transform_index_page_table_prefill",
    "write_index_k_cache",
]


def __getattr__(name: str) -> ModuleType:
    """`cpattn.distributed` needs torch, so it is imported when it is asked for."""
    if name == "distributed":
        return import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "distributed"]
