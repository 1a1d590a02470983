# Sparse attention.
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._types import Tensor as _Tensor
from ._context_parallel import ContextParallelMetadata
from ._shared import _Indices, _Value

@final
class DsaMetadata(_Value):
    @property
    def forward_mode(self) -> Any: ...
    @property
    def topk_transform_method(self) -> Any: ...
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def topk(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def max_seqlen_q(self) -> int: ...
    @property
    def max_seqlen_k(self) -> int: ...
    @property
    def _forward_mode(self) -> int: ...
    @property
    def _topk_transform_method(self) -> int: ...
    @property
    def bs_idx(self) -> NDArray[np.int32]: ...
    @property
    def extend_lens(self) -> NDArray[np.int32]: ...
    @property
    def cache_seqlens(self) -> NDArray[np.int32]: ...
    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]: ...
    @property
    def seqlens_expanded(self) -> NDArray[np.int32]: ...
    @property
    def token_to_batch_idx(self) -> NDArray[np.int32]: ...
    @property
    def ks(self) -> NDArray[np.int32]: ...
    @property
    def ke(self) -> NDArray[np.int32]: ...
    @property
    def dsa_cache_seqlens(self) -> NDArray[np.int32]: ...
    @property
    def cu_seqlens_q(self) -> NDArray[np.int32] | None: ...
    @property
    def dsa_cu_seqlens_k(self) -> NDArray[np.int32] | None: ...
    @property
    def topk_indices_offset(self) -> NDArray[np.int32] | None: ...
    @property
    def page_table_1(self) -> NDArray[np.int32] | None: ...
    @property
    def real_page_table(self) -> NDArray[np.int32] | None: ...
    @property
    def page_table_1_flattened(self) -> NDArray[np.int32] | None: ...
    def to_dict(self) -> dict[str, Any]: ...

def restore_dsa_metadata(state: tuple[Any, ...], /) -> DsaMetadata: ...
def build_dsa_metadata(
    extend_lens: _Indices | None,
    seq_lens: _Indices,
    forward_mode: int,
    topk: int,
    fp8_kv_cache: bool,
    prefill_impl: str,
    page_size: int,
    req_to_token: _Indices | None,
    req_pool_indices: _Indices | None,
    num_draft_tokens: int | None,
    cp_metadata: ContextParallelMetadata | None,
    num_rows: int | None,
    /,
) -> DsaMetadata: ...
def fast_topk(
    score: _Tensor,
    lengths: _Indices,
    topk: int,
    row_starts: _Indices | None,
    sorted: bool,
    out: _Tensor,
    /,
) -> None: ...
def fast_topk_transform_fused(
    score: _Tensor,
    lengths: _Indices,
    page_table: _Indices,
    cu_seqlens_q: _Indices | None,
    page_size: int,
    topk: int,
    row_starts: _Indices | None,
    sorted: bool,
    out: _Tensor,
    /,
) -> None: ...
def fast_topk_transform_ragged_fused(
    score: _Tensor,
    lengths: _Indices,
    topk_indices_offset: _Indices,
    topk: int,
    row_starts: _Indices | None,
    sorted: bool,
    out: _Tensor,
    /,
) -> None: ...
def topk_transform(
    logits: _Tensor,
    topk: int,
    method: int | None,
    lengths: _Indices,
    page_table: _Indices | None,
    cu_seqlens_q: _Indices | None,
    topk_indices_offset: _Indices | None,
    row_starts: _Indices | None,
    batch_idx_list: _Indices | None,
    page_size: int,
    sorted: bool,
    out: _Tensor,
    /,
) -> None: ...
def transform_index_page_table_decode(
    page_table: _Indices, topk_indices: _Indices, page_size: int, out: _Tensor, /
) -> None: ...
def transform_index_page_table_prefill(
    page_table: _Indices,
    topk_indices: _Indices,
    extend_lens: _Indices,
    page_size: int,
    out: _Tensor,
    /,
) -> None: ...
def page_table_to_topk(
    page_table: _Indices, lengths: _Indices, page_size: int, out: _Tensor, /
) -> None: ...
def get_topk_transform_method(
    forward_mode: int | None, fp8_kv_cache: bool, prefill_impl: str, /
) -> int: ...
def quantize_kv_rows(nope: _Tensor, rope: _Tensor, out: _Tensor, num_code_bytes: int) -> None: ...
def quantize_kv_rows_separate(
    nope: _Tensor, rope: _Tensor, codes: _Tensor, rope_out: _Tensor
) -> None: ...
def dequantize_kv_rows(rows: _Tensor, indices: _Indices | None, out: _Tensor) -> None: ...
def hadamard_transform(x: _Tensor, scale: float, out: _Tensor) -> None: ...
def quantize_index(x: _Tensor, power_of_two: bool, codes: _Tensor, scale: _Tensor) -> None: ...
def quantize_index_keys(x: _Tensor, power_of_two: bool, codes: _Tensor, scale: _Tensor) -> None: ...
def write_index_k_cache(cache: _Tensor, slots: _Indices, k: _Tensor, k_scale: _Tensor) -> None: ...
def read_index_k_cache(cache: _Tensor, slots: _Indices, codes: _Tensor, scale: _Tensor) -> None: ...
def split_qk_norm(
    x: _Tensor,
    q_weight: _Tensor,
    kv_weight: _Tensor,
    q_bias: _Tensor | None,
    kv_bias: _Tensor | None,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    q_eps: float,
    kv_eps: float,
    q: _Tensor,
    k_nope: _Tensor,
    k_pe: _Tensor,
    latent: _Tensor | None,
) -> None: ...
def fused_split_qk_norm(
    x: _Tensor,
    q_weight: _Tensor,
    kv_weight: _Tensor,
    q_bias: _Tensor | None,
    kv_bias: _Tensor | None,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    q_eps: float,
    kv_eps: float,
    q: _Tensor,
    k_nope: _Tensor,
    k_pe: _Tensor,
    latent: _Tensor | None,
) -> None: ...
def cp_indexer_topk(
    q: _Tensor,
    index_k_cache: _Tensor,
    weights: _Tensor,
    metadata: ContextParallelMetadata,
    block_tables: _Indices,
    page_size: int,
    topk: int,
    prefix_lens: _Indices | None,
    k_scale: _Tensor | None,
    sorted: bool,
    num_threads: int | None,
    out: _Tensor,
) -> None: ...
def dcp_local_indices(
    indices: _Tensor, dcp_rank: int, dcp_size: int, interleave_size: int, out: _Tensor
) -> None: ...
def indexer_logits(
    q: _Tensor,
    k: _Tensor,
    weights: _Tensor,
    ks: _Indices,
    ke: _Indices,
    k_scale: _Tensor | None,
    out: _Tensor,
) -> None: ...
def indexer_topk(
    q: _Tensor,
    k: _Tensor,
    weights: _Tensor,
    ks: _Indices,
    ke: _Indices,
    k_scale: _Tensor | None,
    sorted: bool,
    out: _Tensor,
) -> None: ...
def flash_mla_sparse_fwd(
    q: _Tensor,
    kv: _Tensor,
    indices: _Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: _Tensor | None,
    topk_length: _Indices | None,
    num_threads: int | None,
    out: _Tensor,
    max_logits: _Tensor,
    lse: _Tensor,
) -> None: ...
