# Operators of Ascend NPUs.
from .._types import Tensor as _Tensor
from ._shared import _Bound, _Indices

def npu_lightning_indexer(
    query: _Tensor,
    key: _Tensor,
    weights: _Tensor,
    actual_seq_lengths_query: _Indices | None,
    actual_seq_lengths_key: _Indices | None,
    block_table: _Indices | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    indices: _Tensor,
    values: _Tensor | None,
) -> None: ...

class Fia(_Bound):
    def __init__(
        self,
        query: _Tensor,
        key: _Tensor,
        value: _Tensor,
        *,
        query_rope: _Tensor | None,
        key_rope: _Tensor | None,
        atten_mask: _Tensor | None,
        actual_seq_lengths: _Indices | None,
        actual_seq_lengths_kv: _Indices | None,
        block_table: _Indices | None,
        num_heads: int,
        num_key_value_heads: int,
        scale: float,
        pre_tokens: int,
        next_tokens: int,
        input_layout: str,
        sparse_mode: int,
        inner_precise: int,
        block_size: int,
        softmax_lse_flag: bool,
    ) -> None: ...
    @property
    def out_shape(self) -> tuple[int, ...]: ...
    @property
    def lse_shape(self) -> tuple[int, ...]: ...
    def run(self, out: _Tensor, lse: _Tensor) -> None: ...

def npu_sparse_flash_attention(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    sparse_indices: _Tensor,
    scale_value: float,
    block_table: _Indices | None,
    actual_seq_lengths_query: _Indices | None,
    actual_seq_lengths_kv: _Indices | None,
    query_rope: _Tensor | None,
    key_rope: _Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    out: _Tensor,
    softmax_max: _Tensor | None,
    softmax_sum: _Tensor | None,
) -> None: ...
