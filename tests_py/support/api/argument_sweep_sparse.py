# SPDX-License-Identifier: Apache-2.0
"""Good calls of sparse attention, of the oracles, and of what does not compute."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import cpattn
from cpattn import ForwardMode, TopkTransformMethod, reference
from support.api.argument_kinds import (
    BATCH,
    LAYER,
    METADATA,
    OPTIONS,
    SPARSE_MLA,
    Call,
    f32,
    i32,
)

BARE_METADATA = cpattn.build_cp_metadata(
    [4, 4], [7, 4], cp_rank=0, cp_size=2, kv_len_convention="bare"
)

INDEXER = {
    "q": ("tensor", f32(2, 1, 16)),
    "k": ("tensor", f32(6, 16)),
    "weights": ("tensor", f32(2, 1)),
    "ks": ("ints", [0, 3]),
    "ke": ("ints", [6, 5]),
    "k_scale": ("?tensor", f32(6)),
}
CP_SPARSE = {
    "q": ("tensor", f32(4, 2, 32)),
    "kv": ("tensor", f32(16, 1, 32)),
    "index_q": ("tensor", f32(4, 1, 16)),
    "index_k_cache": ("tensor", f32(2, 8, 16)),
    "weights": ("tensor", f32(4, 1)),
    "block_tables": ("table", [[0], [1]]),
    "page_size": ("int", 8),
    "topk": ("int", 3),
    "sm_scale": ("float", 0.25),
    "d_v": ("int", 16),
    "attn_sink": ("?tensor", f32(2)),
    "index_k_scale": ("?tensor", f32(2, 8)),
    "num_threads": ("?int", 1),
    "out": ("?output", f32(4, 2, 16)),
    "return_lse": ("flag", True),
}
TOPK = {
    "score": ("tensor", f32(2, 8)),
    "lengths": ("ints", [8, 4]),
    "topk": ("int", 3),
    "row_starts": ("?ints", [0, 1]),
    "sorted": ("flag", True),
}
SPLIT = {
    "x": ("tensor", f32(3, 16 + 8 + 4)),
    "q_weight": ("tensor", f32(16)),
    "kv_weight": ("tensor", f32(8)),
    "q_lora_rank": ("int", 16),
    "kv_lora_rank": ("int", 8),
    "qk_rope_head_dim": ("int", 4),
    "q_bias": ("?tensor", f32(16)),
    "kv_bias": ("?tensor", f32(8)),
}
MODE = {"forward_mode": ("int", ForwardMode.EXTEND)}
CODES = np.zeros((3, 1, 656), np.uint8)
INDEX_CACHE = np.zeros((4, 8 * 132), np.uint8)

SPARSE_CALLS = [
    Call(
        cpattn.sparse.build_dsa_metadata,
        {
            "extend_lens": ("?ints", [3, 2]),
            "seq_lens": ("ints", [10, 4]),
            **MODE,
            "topk": ("int", 4),
            "fp8_kv_cache": ("flag", True),
            "prefill_impl": ("text", "flashmla_sparse"),
            "page_size": ("int", 1),
            "req_to_token": ("?table", np.arange(24).reshape(2, 12)),
            "req_pool_indices": ("?ints", [0, 1]),
            "cp_metadata": (
                "?value",
                cpattn.build_cp_metadata([3, 2], [10, 4], cp_rank=0, cp_size=1),
            ),
            "num_rows": ("?int", 5),
        },
    ),
    Call(
        cpattn.sparse.build_dsa_metadata,
        {
            "extend_lens": ("any", None),
            "seq_lens": ("ints", [10, 4]),
            "forward_mode": ("int", ForwardMode.TARGET_VERIFY),
            "topk": ("int", 4),
            "fp8_kv_cache": ("flag", True),
            "prefill_impl": ("text", "fa3"),
            "num_draft_tokens": ("int", 2),
        },
    ),
    Call(cpattn.sparse.indexer_logits, INDEXER),
    Call(cpattn.sparse.indexer_topk, {**INDEXER, "topk": ("int", 3), "sorted": ("flag", True)}),
    Call(
        cpattn.sparse.cp_indexer_topk,
        {
            "q": ("tensor", f32(4, 1, 16)),
            "index_k_cache": ("tensor", f32(2, 8, 16)),
            "weights": ("tensor", f32(4, 1)),
            "metadata": ("value", METADATA),
            "block_tables": ("table", [[0], [1]]),
            "page_size": ("int", 8),
            "topk": ("int", 3),
            "k_scale": ("?tensor", f32(2, 8)),
            "sorted": ("flag", True),
            "num_threads": ("?int", 1),
        },
    ),
    Call(
        cpattn.sparse.cp_indexer_topk,
        {
            "q": ("tensor", f32(4, 1, 16)),
            "index_k_cache": ("tensor", f32(2, 8, 16)),
            "weights": ("tensor", f32(4, 1)),
            "metadata": ("value", BARE_METADATA),
            "block_tables": ("table", [[0], [1]]),
            "page_size": ("int", 8),
            "topk": ("int", 3),
            "prefix_lens": ("ints", [3, 0]),
        },
    ),
    Call(cpattn.sparse.cp_sparse_mla, {**CP_SPARSE, "metadata": ("value", METADATA)}),
    Call(
        cpattn.sparse.cp_sparse_mla,
        {**CP_SPARSE, "metadata": ("value", BARE_METADATA), "prefix_lens": ("ints", [3, 0])},
    ),
    Call(
        cpattn.sparse.dcp_local_indices,
        {
            "indices": ("tensor", i32([9, 4, 7, 2, -1])),
            "dcp_rank": ("int", 1),
            "dcp_size": ("int", 2),
            "interleave_size": ("int", 1),
        },
    ),
    Call(cpattn.sparse.fast_topk, TOPK),
    Call(
        cpattn.sparse.fast_topk_transform_fused,
        {
            **TOPK,
            "page_table_size_1": ("table", i32(range(8), range(8))),
            "cu_seqlens_q": ("?ints", [0, 1, 2]),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.fast_topk_transform_ragged_fused,
        {**TOPK, "topk_indices_offset": ("ints", [0, 9])},
    ),
    Call(
        cpattn.sparse.topk_transform,
        {
            "logits": ("tensor", f32(2, 8)),
            **{name: value for name, value in TOPK.items() if name != "score"},
            "method": ("?int", TopkTransformMethod.PAGED),
            "page_table": ("?table", i32(range(8), range(8))),
            "cu_seqlens_q": ("?ints", [0, 1, 2]),
            "topk_indices_offset": ("?ints", [0, 9]),
            "batch_idx_list": ("?ints", [1, 0]),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.transform_index_page_table_decode,
        {
            "page_table": ("tensor", i32([3, 4], [5, 6])),
            "topk_indices": ("tensor", i32([1, 0], [0, -1])),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.transform_index_page_table_prefill,
        {
            "page_table": ("tensor", i32([3, 4])),
            "topk_indices": ("tensor", i32([1, 0], [0, -1])),
            "extend_lens_cpu": ("ints", [2]),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.page_table_to_topk,
        {
            "page_table": ("tensor", i32([3, 4], [5, 6])),
            "lengths": ("ints", [2, 1]),
            "topk": ("int", 2),
            "num_rows": ("?int", 3),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.pad_topk_indices,
        {"topk_indices": ("any", i32([1, 0])), "num_tokens": ("int", 3)},
    ),
    Call(
        cpattn.get_topk_transform_method,
        {
            "forward_mode": ("?int", ForwardMode.EXTEND),
            "fp8_kv_cache": ("flag", True),
            "prefill_impl": ("text", "fa3"),
        },
    ),
    Call(
        cpattn.sparse.quantize_kv_rows,
        {
            "nope": ("tensor", f32(3, 512)),
            "rope": ("tensor", f32(3, 64)),
            "out": ("?output", CODES.copy()),
        },
    ),
    Call(
        cpattn.sparse.quantize_kv_rows_separate,
        {"nope": ("tensor", f32(3, 512)), "rope": ("tensor", f32(3, 64))},
    ),
    Call(
        cpattn.sparse.dequantize_kv_rows,
        {
            "rows": ("tensor", CODES),
            "indices": ("?ints", [2, 0]),
            "out": ("?output", np.zeros((2, 1, 576), ml_dtypes.bfloat16)),
        },
    ),
    Call(
        cpattn.sparse.hadamard_transform, {"x": ("tensor", f32(3, 16)), "scale": ("?float", 0.25)}
    ),
    Call(
        cpattn.sparse.quantize_index,
        {
            "x": ("tensor", f32(3, 128)),
            "dtype": ("text", "int8"),
            "scale_fmt": ("any", None),
        },
    ),
    Call(
        cpattn.sparse.quantize_index,
        {
            "x": ("tensor", f32(3, 128)),
            "dtype": ("text", "float8_e4m3fn"),
            "scale_fmt": ("?text", "ue8m0"),
        },
    ),
    Call(
        cpattn.sparse.write_index_k_cache,
        {
            "cache": ("output", INDEX_CACHE.copy()),
            "slots": ("ints", [3, 9]),
            "k": ("tensor", np.zeros((2, 128), np.uint8)),
            "k_scale": ("?tensor", f32(2)),
        },
    ),
    Call(
        cpattn.sparse.write_index_k_cache,
        {
            "cache": ("output", INDEX_CACHE.copy()),
            "slots": ("ints", [3, 9]),
            "k": ("tensor", f32(2, 128)),
            "scale_fmt": ("?text", "ue8m0"),
        },
    ),
    Call(
        cpattn.sparse.read_index_k_cache,
        {
            "cache": ("tensor", INDEX_CACHE),
            "slots": ("ints", [3, 9]),
            "dtype": ("text", "int8"),
        },
    ),
    Call(
        cpattn.sparse.split_qk_norm, {**SPLIT, "q_eps": ("float", 1e-6), "kv_eps": ("float", 1e-6)}
    ),
    Call(cpattn.sparse.fused_split_qk_norm, {**SPLIT, "eps": ("float", 1e-6)}),
    Call(
        cpattn.sparse.can_fuse_split_qk_norm,
        {"num_rows": ("int", 3), "neox_rope": ("flag", False), "uses_prefill_cp": ("flag", False)},
    ),
    Call(
        cpattn.sparse.dsa_use_prefill_cp,
        {
            "forward_mode": ("?int", ForwardMode.EXTEND),
            "has_cp_metadata": ("flag", True),
            "enabled": ("flag", True),
        },
    ),
    Call(cpattn.set_num_threads, {"num_threads": ("int", 2)}),
    Call(cpattn.profile, {"max_events": ("int", 10)}),
    Call(ForwardMode.EXTEND.is_extend, {"include_draft_extend_v2": ("flag", False)}, "ForwardMode"),
    Call(
        ForwardMode.EXTEND.is_context_parallel_extend,
        {"include_draft_extend_v2": ("flag", False)},
        "ForwardMode",
    ),
    Call(
        reference.paged_attention,
        {
            **LAYER,
            **{
                name: BATCH[name]
                for name in BATCH
                if name not in ("batch_invariant", "num_threads")
            },
            **{name: OPTIONS[name] for name in OPTIONS if name not in ("out", "lse", "return_lse")},
            "page_size": ("?int", 8),
        },
        "reference.paged_attention",
    ),
    Call(reference.flash_mla_sparse_fwd, SPARSE_MLA, "reference.flash_mla_sparse_fwd"),
    Call(
        reference.merge_state,
        {
            "out_a": ("tensor", f32(2, 2, 16)),
            "lse_a": ("tensor", f32(2, 2)),
            "out_b": ("tensor", f32(2, 2, 16)),
            "lse_b": ("tensor", f32(2, 2)),
        },
        "reference.merge_state",
    ),
    Call(reference.indexer_logits, INDEXER, "reference.indexer_logits"),
    Call(
        reference.rms_norm,
        {
            "x": ("tensor", f32(2, 16)),
            "weight": ("tensor", f32(16)),
            "eps": ("float", 1e-6),
            "bias": ("?tensor", f32(16)),
        },
        "reference.rms_norm",
    ),
    Call(
        reference.hadamard_transform,
        {"x": ("tensor", f32(2, 16)), "scale": ("?float", 0.25)},
        "reference.hadamard_transform",
    ),
    Call(
        reference.dequantize_kv_rows,
        {"rows": ("tensor", np.zeros((2, 656), np.uint8))},
        "reference.dequantize_kv_rows",
    ),
]
