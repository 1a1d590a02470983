# SPDX-License-Identifier: Apache-2.0
"""A good call of every public function that computes, or plans what is computed."""

from __future__ import annotations

import numpy as np

import cpattn
from cpattn import ForwardMode
from support.api.argument_kinds import BATCH, LAYER, METADATA, OPTIONS, SPARSE_MLA, Call, f32
from support.api.argument_sweep_sparse import SPARSE_CALLS

PLAN = cpattn.plan_attention(
    q_lens=[3], kv_lens=[10], block_tables=[[2, 0]], page_size=8, num_pages=4, num_heads=2,
    num_kv_heads=1, head_dim=16,
)  # fmt: skip

CP_BATCH = {
    "extend_lens": ("ints", [4, 4]),
    "seq_lens": ("?ints", [7, 4]),
    "cp_size": ("int", 2),
    "strategy": ("text", "zigzag"),
    "num_tokens": ("?int", 8),
    "kv_len_convention": ("text", "baked"),
    "compat": ("flag", False),
}

CP_LAYER = {
    "q": ("tensor", f32(4, 32)),
    "k_cache": ("tensor", f32(4, 8, 1, 16)),
    "metadata": ("value", METADATA),
    "block_tables": ("table", [[1], [2]]),
    "page_size": ("int", 8),
    "num_heads": ("int", 2),
    "num_kv_heads": ("int", 1),
    "scale": ("?float", 0.25),
    "softcap": ("float", 2.0),
    "sinks": ("?tensor", f32(2)),
    "out": ("?output", f32(4, 32)),
    "return_lse": ("flag", True),
}

NOT_SUPPORTED = (
    "pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2",
    "quant_offset2", "query_padding_size", "kv_padding_size", "key_shared_prefix",
    "value_shared_prefix", "actual_shared_prefix_len", "key_rope_antiquant_scale",
)  # fmt: skip

CALLS = [
    Call(cpattn.paged_attention, {**LAYER, **BATCH, "page_size": ("?int", 8), **OPTIONS}),
    Call(
        cpattn.paged_attention,
        {
            **LAYER,
            **BATCH,
            "custom_mask": ("any", None),
            "packed_custom_mask": ("?tensor", np.ones(4, np.uint8)),
        },
    ),
    Call(
        cpattn.paged_attention,
        {
            **LAYER,
            "q_lens": ("ints", [3]),
            "kv_indptr": ("ints", [0, 2]),
            "kv_indices": ("ints", [2, 0]),
            "last_page_len": ("ints", [2]),
        },
    ),
    Call(
        cpattn.plan_attention,
        {
            **BATCH,
            "page_size": ("int", 8),
            "num_pages": ("int", 4),
            "num_heads": ("int", 2),
            "num_kv_heads": ("int", 1),
            "head_dim": ("int", 16),
            "v_head_dim": ("?int", 16),
        },
    ),
    Call(
        cpattn.plan_attention,
        {
            **BATCH,
            "custom_mask": ("any", None),
            "packed_custom_mask": ("?tensor", np.ones(4, np.uint8)),
            "page_size": ("int", 8),
            "num_pages": ("int", 4),
            "num_heads": ("int", 2),
            "num_kv_heads": ("int", 1),
            "head_dim": ("int", 16),
            "v_head_dim": ("?int", 16),
        },
    ),
    Call(cpattn.run_attention, {"plan": ("value", PLAN), **LAYER, **OPTIONS}),
    Call(
        cpattn.merge_state,
        {
            "out_a": ("output", f32(2, 2, 16)),
            "lse_a": ("output", f32(2, 2)),
            "out_b": ("tensor", f32(2, 2, 16)),
            "lse_b": ("tensor", f32(2, 2)),
        },
    ),
    Call(
        cpattn.do_cp_attn_fia,
        {
            **CP_LAYER,
            "v_cache": ("?tensor", f32(4, 8, 1, 16)),
            "k_scale": ("?scale", 0.5),
            "v_scale": ("?scale", 2.0),
            "kv_dtype": ("?text", None),
            "causal": ("flag", True),
            "window": ("?int", 3),
            "custom_mask": ("?tensor", np.ones(44, bool)),
        },
    ),
    Call(
        cpattn.do_cp_attn_fia,
        {
            **CP_LAYER,
            "v_cache": ("any", None),
            "packed_custom_mask": ("?tensor", np.ones(6, np.uint8)),
            "q_rope": ("?tensor", f32(4, 32)),
            "k_rope": ("?tensor", f32(4, 8, 1, 16)),
            "v_head_dim": ("?int", 16),
        },
    ),
    Call(
        cpattn.npu.npu_fused_infer_attention_score,
        {
            "query": ("tensor", f32(3, 4, 16)),
            "key": ("tensor", f32(2, 8, 64)),
            "value": ("tensor", f32(2, 8, 64)),
            "input_layout": ("text", "TND"),
            "num_heads": ("int", 4),
            "num_key_value_heads": ("int", 4),
            "scale": ("float", 0.25),
            "block_table": ("?table", [[1, 0]]),
            "block_size": ("int", 8),
            "actual_seq_lengths": ("?ints", [3]),
            "actual_seq_lengths_kv": ("?ints", [10]),
            "query_rope": ("?tensor", f32(3, 4, 16)),
            "key_rope": ("?tensor", f32(2, 8, 64)),
            "sparse_mode": ("int", 3),
            "atten_mask": ("?tensor", np.ones((2048, 2048), bool)),
            "pre_tokens": ("int", 2147483647),
            "next_tokens": ("int", 2147483647),
            "inner_precise": ("int", 0),
            "softmax_lse_flag": ("flag", True),
            **dict.fromkeys(NOT_SUPPORTED, ("?nothing", None)),
        },
    ),
    Call(
        cpattn.npu.npu_fused_infer_attention_score,
        {
            "query": ("tensor", f32(1, 3, 4, 16)),
            "key": ("tensor", np.ones((1, 10, 4, 16), np.int8)),
            "value": ("tensor", np.ones((1, 10, 4, 16), np.int8)),
            "input_layout": ("text", "BSND"),
            "num_heads": ("int", 4),
            "antiquant_mode": ("int", 0),
            "antiquant_scale": ("?tensor", f32(2, 4, 16)),
            "antiquant_offset": ("?tensor", f32(2, 4, 16)),
            "key_antiquant_mode": ("int", 0),
            "key_antiquant_scale": ("tensor", f32(4, 16)),
            "key_antiquant_offset": ("tensor", f32(64)),
            "value_antiquant_mode": ("int", 0),
            "value_antiquant_scale": ("tensor", f32(1)),
            "value_antiquant_offset": ("tensor", f32(4, 16)),
        },
    ),
    Call(
        cpattn.npu.npu_lightning_indexer,
        {
            "query": ("tensor", f32(2, 1, 16)),
            "key": ("tensor", f32(2, 4, 1, 16)),
            "weights": ("tensor", f32(2, 1)),
            "actual_seq_lengths_query": ("?ints", [2]),
            "actual_seq_lengths_key": ("?ints", [5]),
            "block_table": ("?table", [[0, 1]]),
            "layout_query": ("text", "TND"),
            "layout_key": ("text", "PA_BSND"),
            "sparse_count": ("int", 3),
            "sparse_mode": ("int", 3),
            "pre_tokens": ("int", 2**63 - 1),
            "next_tokens": ("int", 2**63 - 1),
            "return_value": ("flag", True),
        },
    ),
    Call(
        cpattn.npu.npu_sparse_flash_attention,
        {
            "query": ("tensor", f32(2, 4, 16)),
            "key": ("tensor", f32(3, 8, 1, 16)),
            "value": ("tensor", f32(3, 8, 1, 16)),
            "sparse_indices": ("tensor", np.array([[[0, 9]], [[9, -1]]])),
            "scale_value": ("float", 0.25),
            "block_table": ("?table", [[2, 0]]),
            "actual_seq_lengths_query": ("?ints", [2]),
            "actual_seq_lengths_kv": ("?ints", [10]),
            "query_rope": ("?tensor", f32(2, 4, 16)),
            "key_rope": ("?tensor", f32(3, 8, 1, 16)),
            "sparse_block_size": ("int", 1),
            "layout_query": ("text", "TND"),
            "layout_kv": ("text", "PA_BSND"),
            "sparse_mode": ("int", 3),
            "pre_tokens": ("int", 2**63 - 1),
            "next_tokens": ("int", 2**63 - 1),
            "attention_mode": ("int", 2),
            "return_softmax_lse": ("flag", True),
        },
    ),
    Call(
        cpattn.sparse.flash_mla_sparse_fwd,
        {**SPARSE_MLA, "out": ("?output", f32(2, 4, 16)), "num_threads": ("?int", 1)},
    ),
    Call(cpattn.build_cp_metadata, {**CP_BATCH, "cp_rank": ("int", 0)}),
    Call(cpattn.build_cp_metadata_all_ranks, CP_BATCH),
    Call(
        cpattn.can_apply_cp,
        {
            "extend_lens": ("ints", [4, 4]),
            "cp_size": ("int", 2),
            "strategy": ("text", "zigzag"),
            "num_tokens": ("?int", 8),
            "forward_mode": ("?int", ForwardMode.EXTEND),
        },
    ),
    Call(
        cpattn.sparse.can_dsa_prefill_cp_interleave,
        {
            "extend_lens": ("ints", [4, 4]),
            "cp_size": ("int", 2),
            "strategy": ("text", "interleave"),
            "forward_mode": ("?int", ForwardMode.EXTEND),
        },
    ),
    Call(
        METADATA.shard,
        {"x": ("any", np.ones((8, 2))), "dim": ("int", 0), "truncate": ("flag", False)},
    ),
    Call(METADATA.unshard, {"parts": ("value", [f32(4, 2), f32(4, 2)]), "dim": ("int", 0)}),
    *SPARSE_CALLS,
]
