# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (DSA): an indexer selects the keys of each query, latent attention reads them.

    chosen = indexer_topk(index_q, index_k, weights, ks, ke, topk=2048)
    out, *_ = flash_mla_sparse_fwd(q, kv, chosen[:, None], scale)

``indexer`` scores keys, with ``cp_indexer`` under context parallelism and ``index_k`` for a cache
of index keys; ``topk`` selects, and maps indices to slots; ``blocks`` selects blocks of keys;
``sparse_mla`` attends; ``cp_sparse_mla`` does all of it for the tokens of a rank. ``kv_rows`` has
rows of 656 bytes, ``split_norm`` the projection before, ``dsa_metadata`` the integers of a batch,
``gates`` tells whether to split it; only ``sglang_0_5_23`` has functions under names of that
release. Imports NumPy, the core, and the forward modes of `cpattn.context_parallel`.
"""

from . import sglang_0_5_23 as sglang_0_5_23
from .blocks import SelectedBlocks, merge_blocks, select_blocks
from .cp_attention import cp_sparse_mla
from .cp_indexer import cp_indexer_topk, dcp_local_indices
from .dsa_metadata import DsaMetadata, build_dsa_metadata
from .gates import can_dsa_prefill_cp_interleave, dsa_use_prefill_cp
from .index_k import hadamard_transform, quantize_index, read_index_k_cache, write_index_k_cache
from .indexer import indexer_logits, indexer_topk
from .kv_rows import dequantize_kv_rows, quantize_kv_rows, quantize_kv_rows_separate
from .sparse_mla import flash_mla_sparse_fwd
from .split_norm import can_fuse_split_qk_norm, fused_split_qk_norm, split_qk_norm
from .topk import TopkTransformMethod, get_topk_transform_method, topk_transform

__all__ = [
    "DsaMetadata",
    "SelectedBlocks",
    "TopkTransformMethod",
    "build_dsa_metadata",
    "can_dsa_prefill_cp_interleave",
    "can_fuse_split_qk_norm",
    "cp_indexer_topk",
    "cp_sparse_mla",
    "dcp_local_indices",
    "dequantize_kv_rows",
    "dsa_use_prefill_cp",
    "flash_mla_sparse_fwd",
    "fused_split_qk_norm",
    "get_topk_transform_method",
    "hadamard_transform",
    "indexer_logits",
    "indexer_topk",
    "merge_blocks",
    "quantize_index",
    "quantize_kv_rows",
    "quantize_kv_rows_separate",
    "read_index_k_cache",
    "select_blocks",
    "split_qk_norm",
    "topk_transform",
    "write_index_k_cache",
]
