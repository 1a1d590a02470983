# Types of the compiled core. Written by hand, checked by mypy.stubtest.
from typing import Any, ClassVar, final, type_check_only

import numpy as np
from numpy.typing import NDArray

_Tensor = Any  # torch CPU tensor, NumPy array, or anything with __dlpack__
_Indices = Any  # list or tuple of int, or a NumPy or torch CPU array of int32 or int64

@type_check_only
class _pybind11_type(type): ...

@type_check_only
class _Bound(metaclass=_pybind11_type):  # made by functions of the core only
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

__version__: str
__compiler__: str

def active_isa() -> str: ...
def supported_isas() -> tuple[str, ...]: ...
def set_isa(name: str) -> None: ...
def amx_usable() -> bool: ...
def amx_palette_missing() -> bool: ...
def has_avx512_fp16() -> bool: ...
def default_num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...

@final
class AttentionPlan(_Bound):
    __hash__: ClassVar[None]  # type: ignore[assignment]
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
    def item_costs(self) -> NDArray[np.int64]: ...

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
    num_threads: int | None,
    out: _Tensor,
    lse: _Tensor | None,
) -> None: ...
def merge_state(out_a: _Tensor, lse_a: _Tensor, out_b: _Tensor, lse_b: _Tensor) -> None: ...
