# Plans and attention.
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._types import Tensor as _Tensor
from ._shared import _Indices, _Value

@final
class AttentionPlan(_Value):
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_indptr(self) -> NDArray[np.int64]: ...
    @property
    def page_ids(self) -> NDArray[np.int32]: ...
    @property
    def items(self) -> NDArray[np.int64]: ...
    @property
    def part_keys(self) -> int: ...
    @property
    def item_costs(self) -> NDArray[np.int64]: ...

def restore_attention_plan(state: tuple[Any, ...], /) -> AttentionPlan: ...
def plan_attention(
    q_lens: _Indices,
    kv_lens: _Indices,
    block_tables: _Indices,
    page_size: int,
    num_pages: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    causal: bool,
    window: int | None,
    custom_mask: _Tensor | None,
    allow_short_kv: bool,
    batch_invariant: bool,
    num_threads: int | None,
) -> AttentionPlan: ...
def run_attention(
    plan: AttentionPlan,
    q: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    kv_layout: str,
    scale: float,
    softcap: float,
    sinks: _Tensor | None,
    out: _Tensor,
    lse: _Tensor | None,
) -> None: ...
def paged_attention(
    q: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    q_lens: _Indices,
    kv_lens: _Indices | None,
    block_tables: _Indices | None,
    kv_indptr: _Indices | None,
    kv_indices: _Indices | None,
    last_page_len: _Indices | None,
    page_size: int | None,
    kv_layout: str,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    sinks: _Tensor | None,
    custom_mask: _Tensor | None,
    allow_short_kv: bool,
    batch_invariant: bool,
    num_threads: int | None,
    out: _Tensor,
    lse: _Tensor | None,
) -> None: ...
def merge_state(out_a: _Tensor, lse_a: _Tensor, out_b: _Tensor, lse_b: _Tensor) -> None: ...
