# SPDX-License-Identifier: Apache-2.0
"""A good call of every public function that computes or plans, and of every oracle."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import cpattn
from cpattn import ForwardMode, TopkTransformMethod, npu, reference, sparse
from cpattn.context_parallel import halo, vllm_0_32
from cpattn.kv import TokenInterleave, plan_units
from cpattn.sparse import sglang_0_5_23
from support.api.argument_kinds import METADATA, Arguments, Call, f32, given, i32, of_kind

PLAN = cpattn.plan_attention(
    q_lens=[2, 1], kv_lens=[10, 9], block_tables=[[2, 0], [1, 3]], page_size=8, num_pages=4,
    num_heads=2, num_kv_heads=1, head_dim=16,
)  # fmt: skip
BARE_METADATA = cpattn.build_cp_metadata(
    [4, 4], [7, 4], cp_rank=0, cp_size=2, kv_len_convention="bare"
)


def call(function: Callable[..., Any], *parts: Arguments) -> Call:
    of_oracle = getattr(function, "__module__", "").startswith(reference.__name__)
    name = f"reference.{function.__name__}" if of_oracle else ""
    return Call(function, {key: value for part in parts for key, value in part.items()}, name)


def without(arguments: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in names}


LAYER = given(q=f32(3, 2, 16), k_cache=f32(4, 8, 1, 16), v_cache=f32(4, 8, 1, 16))
OPTIONS = (
    given(kv_layout="NHD", scale=0.25, softcap=0.0, sinks=f32(2), return_lse=True)
    | given(bias=f32(2, 1, 2, 10), alibi_slopes=f32(2), relative_bias=f32(2, 5))
    | of_kind("?scale", k_scale=0.5, v_scale=f32(1))
    | of_kind("?text", kv_dtype=None)
    | of_kind("?output", out=f32(3, 2, 16), lse=f32(3, 2))
)
LENS = of_kind("ints", q_lens=[2, 1], kv_lens=[10, 9])
LENS |= of_kind("table", block_tables=[[2, 0], [1, 3]])
BATCH = LENS | given(
    causal=True, window=5, custom_mask=np.ones(29, bool), allow_short_kv=False,
    batch_invariant=False, precise=False, num_threads=1, first_positions=[8, 8],
)  # fmt: skip
PACKED = of_kind("any", custom_mask=None) | given(packed_custom_mask=np.ones(5, np.uint8))
PLAN_SIZES = given(
    page_size=8, num_pages=4, num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16
)
CP_LENS = of_kind("ints", extend_lens=[4, 4])
CP_BATCH = CP_LENS | given(
    seq_lens=[7, 4], cp_size=2, strategy="zigzag", num_tokens=8, kv_len_convention="baked",
    compat=False, page_size=2,
) | of_kind("?floats", weights=[1.0, 2])  # fmt: skip
PCP_BATCH = given(
    prefix_lens=[3, 0], pcp_size=2, is_prefill=[True, False], shard_decode=True, dcp_size=1
)
LAYOUT = vllm_0_32.build_pcp_layout([4, 4], [3, 0], pcp_size=2)
CP_LAYER = (
    given(q=f32(4, 32), k_cache=f32(4, 8, 1, 16), metadata=METADATA, block_tables=[[1], [2]])
    | given(page_size=8, num_heads=2, num_kv_heads=1, scale=0.25, softcap=2.0, sinks=f32(2))
    | given(bias=f32(2, 1, 4, 7), alibi_slopes=f32(2), relative_bias=f32(2, 5))
    | of_kind("?output", out=f32(4, 32))
    | given(return_lse=True)
)
NOT_SUPPORTED = (
    "pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2",
    "quant_offset2", "query_padding_size", "kv_padding_size", "key_shared_prefix",
    "value_shared_prefix", "actual_shared_prefix_len", "key_rope_antiquant_scale",
)  # fmt: skip
TOKENS = given(sparse_mode=3, pre_tokens=2**31 - 1, next_tokens=2**31 - 1)
ALL_TOKENS = given(sparse_mode=3, pre_tokens=2**63 - 1, next_tokens=2**63 - 1)
BYTES = np.ones((1, 10, 4, 16), np.int8)
SPARSE_MLA = (
    given(q=f32(2, 4, 32), kv=f32(10, 1, 32), indices=i32([[7, 9, -1]], [[-1, 3, -1]]))
    | given(sm_scale=0.125, d_v=16, attn_sink=f32(4), topk_length=[3, 2])
)  # fmt: skip
INDEXER = (
    given(q=f32(2, 1, 16), k=f32(6, 16), weights=f32(2, 1))
    | given(ks=[0, 3], ke=[6, 5], k_scale=f32(6))
)  # fmt: skip
CP_PAGES = given(block_tables=[[0], [1]], page_size=8, topk=3)
CP_INDEXER = given(q=f32(4, 1, 16), index_k_cache=f32(2, 8, 16), weights=f32(4, 1)) | CP_PAGES
CP_SPARSE = (
    given(q=f32(4, 2, 32), kv=f32(16, 1, 32), index_q=f32(4, 1, 16), index_k_cache=f32(2, 8, 16))
    | given(weights=f32(4, 1), sm_scale=0.25, d_v=16, attn_sink=f32(2), index_k_scale=f32(2, 8))
    | CP_PAGES
    | given(num_threads=1, return_lse=True)
    | of_kind("?output", out=f32(4, 2, 16))
)
BAKED = given(metadata=METADATA)
BARE = given(metadata=BARE_METADATA) | of_kind("ints", prefix_lens=[3, 0])
TOPK = given(score=f32(2, 8), lengths=[8, 4], topk=3, row_starts=[0, 1], sorted=True)
SLOT_TABLE = i32(range(8), range(8))
CHOSEN = given(topk_indices=i32([1, 0], [0, -1]), page_size=1)
PAGE_TABLE = given(page_table=i32([3, 4], [5, 6]))
SPLIT = (
    given(x=f32(3, 16 + 8 + 4), q_weight=f32(16), kv_weight=f32(8))
    | given(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, q_bias=f32(16), kv_bias=f32(8))
)  # fmt: skip
MODE = given(forward_mode=ForwardMode.EXTEND)
CODES = np.zeros((3, 1, 656), np.uint8)
KV_ROWS = given(nope=f32(3, 512), rope=f32(3, 64))
INDEX_CACHE = np.zeros((4, 8 * 132), np.uint8)
INDEX_SLOTS = of_kind("output", cache=INDEX_CACHE.copy()) | given(slots=[3, 9])
DRAFTS = given(include_draft_extend_v2=False)
MERGED = given(out_a=f32(2, 2, 16), lse_a=f32(2, 2), out_b=f32(2, 2, 16), lse_b=f32(2, 2))
STACKED = given(outs=f32(2, 3, 2, 16), lses=f32(2, 3, 2), sinks=f32(2))

CALLS = [
    call(cpattn.paged_attention, LAYER, BATCH, given(page_size=8), OPTIONS),
    call(cpattn.paged_attention, LAYER, BATCH, PACKED),
    call(
        cpattn.paged_attention,
        LAYER,
        of_kind(
            "ints",
            q_lens=[2, 1],
            kv_indptr=[0, 2, 4],
            kv_indices=[2, 0, 1, 3],
            last_page_len=[2, 1],
        ),
    ),
    call(cpattn.plan_attention, BATCH, PLAN_SIZES),
    call(cpattn.plan_attention, BATCH, PACKED, PLAN_SIZES),
    call(cpattn.run_attention, given(plan=PLAN), LAYER, OPTIONS),
    call(cpattn.merge_state, MERGED, of_kind("output", out_a=f32(2, 2, 16), lse_a=f32(2, 2))),
    call(cpattn.merge_states, STACKED, of_kind("?output", out=f32(2, 2, 16), lse=f32(2, 2))),
    call(
        cpattn.do_cp_attn_fia,
        CP_LAYER,
        given(v_cache=f32(4, 8, 1, 16), causal=True, window=3, custom_mask=np.ones(44, bool)),
        of_kind("?scale", k_scale=0.5, v_scale=2.0),
        of_kind("?text", kv_dtype=None),
    ),
    call(
        cpattn.do_cp_attn_fia,
        CP_LAYER,
        of_kind("any", v_cache=None),
        given(packed_custom_mask=np.ones(6, np.uint8), v_head_dim=16),
        given(q_rope=f32(4, 32), k_rope=f32(4, 8, 1, 16), precise=False),
    ),
    call(
        npu.npu_fused_infer_attention_score,
        given(query=f32(3, 4, 16), key=f32(2, 8, 64), value=f32(2, 8, 64), input_layout="TND"),
        given(num_heads=4, num_key_value_heads=4, scale=0.25, block_table=[[1, 0]], block_size=8),
        given(actual_seq_lengths=[3], actual_seq_lengths_kv=[10], query_rope=f32(3, 4, 16)),
        given(key_rope=f32(2, 8, 64), atten_mask=np.ones((2048, 2048), bool)),
        TOKENS,
        given(inner_precise=0, softmax_lse_flag=True),
        of_kind("?nothing", **dict.fromkeys(NOT_SUPPORTED)),
    ),
    call(
        npu.npu_fused_infer_attention_score,
        given(query=f32(1, 3, 4, 16), key=BYTES, value=BYTES, input_layout="BSND", num_heads=4),
        given(antiquant_scale=f32(2, 4, 16), antiquant_offset=f32(2, 4, 16)),
        given(antiquant_mode=0, key_antiquant_mode=0, value_antiquant_mode=0),
        of_kind("tensor", key_antiquant_scale=f32(4, 16), key_antiquant_offset=f32(64)),
        of_kind("tensor", value_antiquant_scale=f32(1), value_antiquant_offset=f32(4, 16)),
    ),
    call(
        npu.npu_lightning_indexer,
        given(query=f32(2, 1, 16), key=f32(2, 4, 1, 16), weights=f32(2, 1)),
        given(actual_seq_lengths_query=[2], actual_seq_lengths_key=[5], block_table=[[0, 1]]),
        given(layout_query="TND", layout_key="PA_BSND", sparse_count=3, return_value=True),
        ALL_TOKENS,
    ),
    call(
        npu.npu_sparse_flash_attention,
        given(query=f32(2, 4, 16), key=f32(3, 8, 1, 16), value=f32(3, 8, 1, 16)),
        given(sparse_indices=np.array([[[0, 9]], [[9, -1]]]), scale_value=0.25),
        given(block_table=[[2, 0]], actual_seq_lengths_query=[2], actual_seq_lengths_kv=[10]),
        given(query_rope=f32(2, 4, 16), key_rope=f32(3, 8, 1, 16), sparse_block_size=1),
        given(layout_query="TND", layout_kv="PA_BSND", attention_mode=2, return_softmax_lse=True),
        ALL_TOKENS,
    ),
    call(
        sparse.flash_mla_sparse_fwd,
        SPARSE_MLA,
        of_kind("?output", out=f32(2, 4, 16)),
        given(num_threads=1),
    ),
    call(cpattn.build_cp_metadata, CP_BATCH, given(cp_rank=0)),
    call(cpattn.build_cp_metadata_all_ranks, CP_BATCH),
    call(cpattn.can_apply_cp, CP_LENS, given(cp_size=2, strategy="zigzag", num_tokens=8), MODE),
    call(
        sparse.can_dsa_prefill_cp_interleave, CP_LENS, given(cp_size=2, strategy="interleave"), MODE
    ),
    call(halo.plan_halo, of_kind("value", metadata=METADATA), given(window=8, ratio=4, rank=0)),
    call(
        halo.plan_pending,
        of_kind("value", metadata=METADATA),
        given(window=8, ratio=4, rank=0, keepers=[0, 1]),
    ),
    call(halo.plan_relayout, of_kind("value", source=METADATA, target=METADATA)),
    call(
        plan_units,
        of_kind("value", metadata=METADATA),
        of_kind("table", block_tables=[[0, 1], [2, 3]]),
        given(ratio=2, page_size=2, placement=TokenInterleave(shard_size=2, interleave=1), rank=0),
    ),
    call(vllm_0_32.pcp_segments, CP_LENS, PCP_BATCH),
    call(vllm_0_32.build_pcp_layout, CP_LENS, PCP_BATCH, given(padded_num_tokens=9)),
    call(LAYOUT.shard, of_kind("any", x=np.ones((8, 2))), given(pcp_rank=1, dim=0)),
    call(LAYOUT.unshard, of_kind("value", parts=[f32(4, 2), f32(4, 2)]), given(dim=0)),
    call(METADATA.shard, of_kind("any", x=np.ones((8, 2))), given(dim=0, truncate=False)),
    call(METADATA.unshard, of_kind("value", parts=[f32(4, 2), f32(4, 2)]), given(dim=0)),
    call(
        sparse.build_dsa_metadata,
        given(extend_lens=[3, 2], seq_lens=[10, 4], topk=4, fp8_kv_cache=True, num_rows=5),
        given(prefill_impl="flashmla_sparse", page_size=1, req_pool_indices=[0, 1]),
        of_kind("?table", req_to_token=np.arange(24).reshape(2, 12)),
        given(cp_metadata=cpattn.build_cp_metadata([3, 2], [10, 4], cp_rank=0, cp_size=1)),
        MODE,
    ),
    call(
        sparse.build_dsa_metadata,
        of_kind("any", extend_lens=None),
        given(seq_lens=[10, 4], forward_mode=ForwardMode.TARGET_VERIFY, topk=4),
        given(fp8_kv_cache=True, prefill_impl="fa3"),
        of_kind("int", num_draft_tokens=2),
    ),
    call(sparse.indexer_logits, INDEXER),
    call(sparse.indexer_topk, INDEXER, given(topk=3, sorted=True)),
    call(
        sparse.cp_indexer_topk,
        CP_INDEXER,
        BAKED,
        given(k_scale=f32(2, 8), sorted=True, num_threads=1),
    ),
    call(sparse.cp_indexer_topk, CP_INDEXER, BARE),
    call(sparse.cp_sparse_mla, CP_SPARSE, BAKED),
    call(sparse.cp_sparse_mla, CP_SPARSE, BARE),
    call(
        sparse.dcp_local_indices,
        given(indices=i32([9, 4, 7, 2, -1]), dcp_rank=1, dcp_size=2, interleave_size=1),
    ),
    call(
        sparse.select_blocks,
        given(score=f32(2, 8), lengths=[8, 4], topk=2, block_size=2, init_blocks=0, local_blocks=1),
        given(dcp_rank=0, dcp_size=1),
    ),
    call(
        sparse.merge_blocks,
        of_kind("table", blocks=i32([1, 0])),
        given(block_scores=f32(1, 2), topk=2),
    ),
    call(sglang_0_5_23.fast_topk, TOPK),
    call(
        sglang_0_5_23.fast_topk_transform_fused,
        TOPK,
        of_kind("table", page_table_size_1=SLOT_TABLE),
        given(cu_seqlens_q=[0, 1, 2], page_size=1),
    ),
    call(sglang_0_5_23.fast_topk_transform_ragged_fused, TOPK, given(topk_indices_offset=[0, 9])),
    call(
        sparse.topk_transform,
        given(logits=f32(2, 8), method=TopkTransformMethod.PAGED),
        without(TOPK, "score"),
        of_kind("?table", page_table=SLOT_TABLE),
        given(cu_seqlens_q=[0, 1, 2], topk_indices_offset=[0, 9], batch_idx_list=[1, 0]),
        given(page_size=1),
    ),
    call(sglang_0_5_23.transform_index_page_table_decode, PAGE_TABLE, CHOSEN),
    call(
        sglang_0_5_23.transform_index_page_table_prefill,
        CHOSEN,
        given(page_table=i32([3, 4]), extend_lens_cpu=[2]),
    ),
    call(
        sglang_0_5_23.page_table_to_topk,
        PAGE_TABLE,
        given(lengths=[2, 1], topk=2, num_rows=3, page_size=1),
    ),
    call(
        sglang_0_5_23.pad_topk_indices,
        of_kind("any", topk_indices=i32([1, 0])),
        given(num_tokens=3),
    ),
    call(cpattn.get_topk_transform_method, MODE, given(fp8_kv_cache=True, prefill_impl="fa3")),
    call(sparse.quantize_kv_rows, KV_ROWS, of_kind("?output", out=CODES.copy())),
    call(sparse.quantize_kv_rows_separate, KV_ROWS),
    call(
        sparse.dequantize_kv_rows,
        given(rows=CODES, indices=[2, 0]),
        of_kind("?output", out=np.zeros((2, 1, 576), ml_dtypes.bfloat16)),
    ),
    call(sparse.hadamard_transform, given(x=f32(3, 16), scale=0.25)),
    call(sparse.quantize_index, given(x=f32(3, 128), dtype="int8"), of_kind("any", scale_fmt=None)),
    call(sparse.quantize_index, given(x=f32(3, 128), dtype="float8_e4m3fn", scale_fmt="ue8m0")),
    call(
        sparse.write_index_k_cache,
        INDEX_SLOTS,
        given(k=np.zeros((2, 128), np.uint8), k_scale=f32(2)),
    ),
    call(sparse.write_index_k_cache, INDEX_SLOTS, given(k=f32(2, 128), scale_fmt="ue8m0")),
    call(sparse.read_index_k_cache, given(cache=INDEX_CACHE, slots=[3, 9], dtype="int8")),
    call(sparse.split_qk_norm, SPLIT, given(q_eps=1e-6, kv_eps=1e-6)),
    call(sparse.fused_split_qk_norm, SPLIT, given(eps=1e-6)),
    call(sparse.can_fuse_split_qk_norm, given(num_rows=3, neox_rope=False, uses_prefill_cp=False)),
    call(sparse.dsa_use_prefill_cp, MODE, given(has_cp_metadata=True, enabled=True)),
    call(cpattn.set_num_threads, given(num_threads=2)),
    call(cpattn.profile, given(max_events=10)),
    Call(ForwardMode.EXTEND.is_extend, DRAFTS, "ForwardMode"),
    Call(ForwardMode.EXTEND.is_context_parallel_extend, DRAFTS, "ForwardMode"),
    call(
        reference.paged_attention,
        LAYER,
        without(BATCH, "batch_invariant", "precise", "num_threads"),
        without(OPTIONS, "out", "lse", "return_lse"),
        given(page_size=8),
    ),
    call(reference.flash_mla_sparse_fwd, SPARSE_MLA),
    call(reference.merge_state, MERGED),
    call(reference.indexer_logits, INDEXER),
    call(reference.rms_norm, given(x=f32(2, 16), weight=f32(16), eps=1e-6, bias=f32(16))),
    call(reference.hadamard_transform, given(x=f32(2, 16), scale=0.25)),
    call(reference.dequantize_kv_rows, given(rows=np.zeros((2, 656), np.uint8))),
]
