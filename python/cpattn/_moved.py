# SPDX-License-Identifier: Apache-2.0
"""Names that were of `cpattn` itself, by the sub-package that has them now."""

_BY_HOME = {
    "cpattn.kv": """
        MHATokenToKVPool MLATokenToKVPool
    """,
    "cpattn.npu": """
        npu_fused_infer_attention_score npu_lightning_indexer npu_sparse_flash_attention
    """,
    "cpattn.profiling": """
        TraceScope
    """,
    "cpattn.sparse": """
        DsaMetadata build_dsa_metadata can_dsa_prefill_cp_interleave can_fuse_split_qk_norm
        cp_indexer_topk dcp_local_indices dequantize_kv_rows dsa_use_prefill_cp fast_topk
        fast_topk_transform_fused fast_topk_transform_ragged_fused flash_mla_sparse_fwd
        fused_split_qk_norm hadamard_transform indexer_logits indexer_topk pad_topk_indices
        page_table_to_topk quantize_index quantize_kv_rows quantize_kv_rows_separate
        read_index_k_cache split_qk_norm topk_transform transform_index_page_table_decode
        transform_index_page_table_prefill write_index_k_cache
    """,
    "cpattn.transfer": """
        DecodeTargets HeadSlice KVArgs KVChunk KVEntry KVLayout KVSendCursor LocalEngine
        TransferEngine TransferError TransferPlan TransferStatus build_transfer_entry_pairs
        decode_targets fill_kv_args get_mha_kv_ptrs_with_pp get_mla_kv_ptrs_with_pp
        group_concurrent_contiguous kv_start_layer kv_to_page_indices kv_to_page_num
        plan_kv_links plan_kv_transfer plan_send_aux plan_send_kvcache plan_send_kvcache_slice
        plan_send_state registration_regions setup_state_kv_args slice_heads
    """,
}

HOME_OF = {name: home for home, names in _BY_HOME.items() for name in names.split()}
