# Layouts, plans and engines' memory.
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transfer.plan import TransferPlan as _TransferPlan
from ._kv import PoolMemory
from ._shared import _Bound, _Indices, _pybind11_type

class TransferPlan(metaclass=_pybind11_type):
    def __init__(
        self,
        src_addrs: Any,
        dst_addrs: Any,
        lengths: Any,
        parts: Sequence[tuple[str, int, int]] = (),
    ) -> None: ...
    @property
    def src_addrs(self) -> NDArray[np.uint64]: ...
    @property
    def dst_addrs(self) -> NDArray[np.uint64]: ...
    @property
    def lengths(self) -> NDArray[np.uint64]: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def parts(self) -> list[tuple[str, int, int]]: ...
    def to_dict(self) -> dict[str, list[int]]: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __copy__(self) -> TransferPlan: ...
    def __deepcopy__(self, memo: object, /) -> TransferPlan: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

class MemoryRanges(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    def add(self, addrs: Sequence[int], sizes: Sequence[int]) -> int: ...
    def remove(self, addrs: Sequence[int]) -> int: ...
    def contain(self, addrs: Sequence[int], lengths: Sequence[int]) -> bool: ...

class Blocks(_Bound):
    def __init__(
        self,
        function: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> None: ...
    def lie_in(self, sources: MemoryRanges, targets: MemoryRanges) -> bool: ...
    def copy(self, num_threads: int | None) -> None: ...
    def lists(self) -> tuple[list[int], list[int], list[int]]: ...
    def source_owners(self) -> list[PoolMemory]: ...
    @property
    def num_bytes(self) -> int: ...

def ranges_to_register(
    function: str, addrs: Sequence[int], sizes: Sequence[int], on_host: bool = True
) -> tuple[list[int], list[int], list[list[PoolMemory]]]: ...
def address_list(name: str, addrs: Sequence[int]) -> list[int]: ...

_Range = tuple[int, int]

def kv_to_page_num(num_tokens: int, page_size: int, /) -> int: ...
def kv_to_page_indices(kv_indices: _Indices, page_size: int, /) -> NDArray[np.int32]: ...
def group_concurrent_contiguous(
    src_indices: _Indices, dst_indices: _Indices, /
) -> tuple[list[list[int]], list[list[int]]]: ...
def mha_kv_entries(
    num_src: int, num_dst: int, prefill_start_layer: int, total_kv_layers: int, compat: bool, /
) -> tuple[_Range, _Range, _Range, _Range, int]: ...
def mla_kv_entries(
    num_src: int,
    num_dst: int,
    prefill_start_layer: int,
    kv_buf_groups: int,
    total_kv_layers: int,
    hidden_kv_layers: int | None,
    draft_kv_layers: int,
    is_last_rank: bool,
    compat: bool,
    /,
) -> list[_Range]: ...
def build_transfer_entry_pairs(
    src_layer_ids: _Indices | None,
    dst_layer_ids: _Indices | None,
    n_src: int,
    n_dst: int,
    allow_positional_fallback: bool,
    /,
) -> list[tuple[int, int]]: ...
def kv_start_layer(start_layer: int, kv_layer_ids: _Indices, /) -> int: ...
def decode_targets(
    engine_rank: int, prefill_tp_size: int, decode_tp_size: int, is_mla: bool, /
) -> tuple[int, int, int, int]: ...
def plan_send_kvcache(
    lists: tuple[Any, ...],
    src_pages: _Indices,
    dst_pages: _Indices,
    stage: tuple[Any, ...],
    compat: bool,
    /,
) -> _TransferPlan: ...
def slice_heads(
    total_kv_heads: int,
    src_tp_size: int,
    src_rank: int,
    dst_tp_size: int,
    dst_rank: int,
    compat: bool,
    /,
) -> tuple[int, int, int, int, int]: ...
def plan_send_kvcache_slice(
    lists: tuple[Any, ...],
    src_pages: _Indices,
    dst_pages: _Indices,
    page_size: int,
    head_slice: tuple[int, int, int, int, int],
    stage: tuple[Any, ...],
    compat: bool,
    /,
) -> _TransferPlan: ...
def plan_send_aux(
    lists: tuple[Any, ...], src_index: int, dst_index: int, compat: bool, /
) -> _TransferPlan: ...
def plan_send_state(components: list[tuple[Any, ...]], compat: bool, /) -> _TransferPlan: ...

class KVLayout(metaclass=_pybind11_type):
    def __init__(
        self,
        entries: Sequence[tuple[Any, ...]],
        page_size: int,
        tp_rank: int,
        tp_size: int,
        total_kv_heads: int | None,
        layers: tuple[int, int] | None,
        dcp_rank: int,
        dcp_size: int,
        dcp_interleave: int,
    ) -> None: ...
    @property
    def _entries(self) -> list[tuple[int, str, bool, int, int, int, bool]]: ...
    @property
    def layers(self) -> tuple[int, int] | None: ...
    @property
    def total_kv_heads(self) -> int | None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def dcp_rank(self) -> int: ...
    @property
    def dcp_size(self) -> int: ...
    @property
    def dcp_interleave(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

def plan_kv_transfer(
    src: KVLayout, dst: KVLayout, src_pages: _Indices, dst_pages: _Indices, **range: Any
) -> _TransferPlan: ...
def plan_kv_links(
    sources: tuple[KVLayout, ...],
    destinations: tuple[KVLayout, ...],
    src_pages: tuple[_Indices, ...],
    dst_pages: tuple[_Indices, ...],
    cp_ranks: _Indices,
    **range: Any,
) -> list[tuple[int, int, _TransferPlan]]: ...
