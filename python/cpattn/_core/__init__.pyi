# Types of the compiled core. Written by hand, checked by mypy.stubtest.
import enum
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, NoReturn, SupportsFloat, final, overload, type_check_only

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from .._types import Flags as _Flags
from .._types import IndexTable as _Table
from .._types import Indices as _OneDimension
from .._types import Reals as _Reals
from .._types import ScoreBias as _ScoreBias
from .._types import Tensor as _Tensor
from .._types import TensorT as _TensorT
from .._types import Window as _Window
from ..context_parallel.vllm_0_32 import RankSegments as _RankSegments
from ..transfer.plan import TransferPlan as _TransferPlan
from . import reference as reference

_Indices = _OneDimension | _Table
_Ints = NDArray[np.int64]

@type_check_only
class _pybind11_type(type): ...

@type_check_only
class _Bound(metaclass=_pybind11_type):  # only functions of the core make instances
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

@type_check_only
class _Value(_Bound):  # an immutable object
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...  # set by cpattn._values
    def _state(self) -> tuple[Any, ...]: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: Any, /) -> Self: ...

__version__: str
__compiler__: str

def active_isa() -> str: ...
def supported_isas() -> tuple[str, ...]: ...
def compiled_isas() -> tuple[str, ...]: ...
def set_isa(name: str) -> None: ...
def amx_usable() -> bool: ...
def amx_palette_missing() -> bool: ...
def has_avx512_fp16() -> bool: ...
def measure_peak(dtype: str, num_threads: int) -> float: ...
def measure_read_bandwidth(num_threads: int) -> float: ...
def set_openmp(address: int) -> None: ...
def uses_openmp() -> bool: ...
def default_num_threads() -> int: ...
def exchange_thread_default(num_threads: int | None) -> int | None: ...
def set_num_threads(num_threads: int) -> None: ...

# Readers of single arguments; their errors name function and argument.
def shape_of(
    tensor: _Tensor, function: str, argument: str, rank: int | None = None
) -> tuple[int, ...]: ...
def dtype_of(value: _Tensor, function: str, argument: str) -> str: ...
def integer(value: Any, function: str, argument: str) -> int: ...
def real(value: Any, function: str, argument: str) -> float: ...
def flags(value: _Flags, count: int, function: str, argument: str) -> list[bool]: ...
def flag(value: Any, function: str, argument: str) -> bool: ...
def key_window(
    value: _Window, causal: bool, function: str, argument: str
) -> tuple[int | None, int | None] | None: ...
def text(value: Any, function: str, argument: str) -> str: ...
def ints(value: _Indices, function: str, argument: str) -> list[int]: ...
def index_count(value: _Indices, function: str, argument: str) -> int: ...

class TraceScope(enum.IntEnum):
    __pybind11_native_enum__: ClassVar[Any]
    pack = 0
    qk = 1
    softmax = 2
    pv = 3
    write = 4
    merge = 5
    gather = 6
    plan = 7
    wait = 8
    item = 9
    call = 10

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

class KVBuffer(_Bound):
    def __init__(
        self,
        function: str,
        num_layers: int,
        num_slots: int,
        row_elements: int,
        dtype: str,
        memory: PoolMemory | None = None,
        nodes: Sequence[int] = ...,
    ) -> None: ...
    @property
    def bytes(self) -> NDArray[np.uint8]: ...
    @property
    def addr(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...

def map_shared_memory(function: str, parts: Sequence[tuple[int, int, int, bool]]) -> PoolMemory: ...
def set_kv_buffer(
    layer: int,
    loc: _Indices,
    num_heads: int,
    k_buffer: KVBuffer,
    k_scale_buffer: KVBuffer | None,
    k: _Tensor,
    k_scale: float | _Tensor | None,
    v_buffer: KVBuffer,
    v_scale_buffer: KVBuffer | None,
    v: _Tensor | None,
    v_scale: float | _Tensor | None,
) -> None: ...
def write_pages(
    slots: _Indices,
    k: _Tensor,
    k_pages: _Tensor,
    v: _Tensor,
    v_pages: _Tensor,
    kv_layout: str,
    k_scale: SupportsFloat,
    v_scale: SupportsFloat,
) -> None: ...
def move_rows(
    sources: _Indices, targets: _Indices, caches: Sequence[_Tensor], kv_layout: str
) -> None: ...
def write_slot_rows(slots: _Indices, rows: _Tensor, pages: _Tensor) -> None: ...
def set_kv_rows(layer: int, loc: _Indices, buffer: KVBuffer, k: _Tensor) -> None: ...
def set_index_k_buffer(layer: int, loc: _Indices, buffer: KVBuffer, index_k: _Tensor) -> None: ...

class Interleave(_Bound):
    def __init__(self, shard_size: int, run_len: int, function: str, run: str, /) -> None: ...
    @property
    def shard_size(self) -> int: ...
    @property
    def run_len(self) -> int: ...
    def owners_of(self, indices: _Indices, function: str, argument: str, /) -> _Ints: ...
    def local_indices(self, indices: _Indices, function: str, argument: str, /) -> _Ints: ...
    def local_share(
        self, indices: _Indices, rank: int, function: str, argument: str, /
    ) -> tuple[_Ints, _Ints]: ...
    def global_indices(
        self, rank: int, local: _Indices, function: str, argument: str, /
    ) -> _Ints: ...
    def local_lens(self, lens: _Indices, rank: int, function: str, argument: str, /) -> _Ints: ...

class BatchPages(_Bound):
    def __init__(
        self, block_tables: _Indices, kv_lens: _Indices, page_size: int, function: str, /
    ) -> None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def kv_lens(self) -> _Ints: ...
    @property
    def indptr(self) -> _Ints: ...
    @property
    def ids(self) -> NDArray[np.int32]: ...
    def tables(self, padding: int, /) -> NDArray[np.int32]: ...
    def slots(self, q_lens: _Indices, padding: int, /) -> _Ints: ...
    def rows(
        self, q_lens: _Indices, padding: int, rows: _Indices | None, /
    ) -> tuple[_Ints, _Ints]: ...
    def checked_slots(
        self, slots: _Indices | None, q_lens: _Indices, padding: int, function: str, /
    ) -> int: ...
    def caches_new_tokens(self, q_lens: _Indices, /) -> bool: ...
    def digest(self) -> int: ...

class BatchKeys(_Bound):
    @overload
    def __init__(self, pages: BatchPages, interleave: Interleave, /) -> None: ...
    @overload
    def __init__(
        self, pages: BatchPages, num_ranks: int, ids: _Indices, owners: _Indices, rows: _Indices, /
    ) -> None: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def run_len(self) -> int: ...
    def held_rows(
        self,
        tokens: tuple[_Indices, int],
        rows_per_rank: _Indices,
        owners: _Indices,
        window: int | None,
        /,
    ) -> HeldRows: ...
    def scratch(
        self,
        tokens: tuple[_Indices, int],
        rows: tuple[_Indices, _Indices],
        rows_per_rank: _Indices,
        part: tuple[bool, bool, bool],
        window: int | None,
        /,
    ) -> tuple[NDArray[np.int32], int, list[_Ints], _Ints, _Ints]: ...

class LocalPages(_Bound):
    def __init__(self, page_size: int, indptr: _Indices, ids: _Indices, /) -> None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def indptr(self) -> _Ints: ...
    @property
    def ids(self) -> _Ints: ...

class KeyShare(_Bound):
    def __init__(self, keys: BatchKeys, ranks: _Indices, /) -> None: ...
    def count_below(self, request: _Indices, position: _Indices, /) -> _Ints: ...
    def counts(self) -> _Ints: ...
    def local_keys(self) -> tuple[_Ints, _Ints, _Ints]: ...
    def local_pages(self) -> LocalPages: ...
    def rows_of(self, request: _Indices, positions: _Indices, /) -> NDArray[np.int32]: ...
    def call(
        self,
        pages: LocalPages,
        request: _Indices,
        position: _Indices,
        causal: bool,
        window: _Window,
        mask: tuple[Any, ...] | None,
        /,
    ) -> tuple[Any, ...] | None: ...

def plan_striped_draw(
    pages: Interleave,
    free_pages: _Indices,
    prefix_lens: _Indices,
    seq_lens: _Indices,
    rotation_bases: list[int | None],
    /,
) -> tuple[list[int], _Ints] | None: ...
def split_striped_pages(
    pages: Interleave, slots: _Indices, end: int, /
) -> tuple[_Ints, list[int]]: ...

class StripedAllocator(_Bound):
    def __init__(self, size: int, page_size: int, shard_size: int, need_sort: bool, /) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def shard_size(self) -> int: ...
    @property
    def need_sort(self) -> bool: ...
    def alloc_extend(
        self, prefix_lens: _Indices, seq_lens: _Indices, rotation_bases: list[int | None], /
    ) -> _Ints | None: ...
    def alloc_cyclic(self, start_class: int, num_slots: int, /) -> _Ints | None: ...
    def free(self, slots: _Indices, /) -> None: ...
    def class_free_page_counts(self) -> list[int]: ...
    def least_full_class(self) -> int: ...
    def available_size(self) -> int: ...
    def aggregate_free_size(self) -> int: ...

@final
class ShardGatherPlan(_Value):
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def shard_size(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def max_prefix_tokens(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def block_pages(self) -> int: ...
    @property
    def chunk_page(self) -> int: ...
    @property
    def trash_page(self) -> int: ...
    @property
    def prefix_pages(self) -> NDArray[np.int32]: ...
    @property
    def chunk_pages(self) -> NDArray[np.int32]: ...
    @property
    def page_pos(self) -> NDArray[np.int32]: ...
    @property
    def send_pages(self) -> NDArray[np.int32]: ...
    def translate(self, slots: _Indices) -> _Ints: ...
    def write_plan(self, slots: _Indices, rank: int) -> tuple[_Ints, _Ints]: ...
    def to_dict(self) -> dict[str, Any]: ...

def restore_shard_gather_plan(state: tuple[Any, ...], /) -> ShardGatherPlan: ...
def plan_shard_gather(
    req_to_token: _Indices,
    req_pool_indices: _Indices | None,
    prefix_lens: _Indices,
    seq_lens: _Indices,
    placement: Interleave,
    size: int,
    max_prefix_tokens: int,
    chunk_tokens: int,
    /,
) -> ShardGatherPlan: ...

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
    def differing(self, num_threads: int | None) -> list[int]: ...
    def lists(self) -> tuple[list[int], list[int], list[int]]: ...
    def source_owners(self) -> list[PoolMemory]: ...
    @property
    def num_bytes(self) -> int: ...

class PoolMemory(_Bound): ...

def ranges_to_register(
    function: str, addrs: Sequence[int], sizes: Sequence[int], on_host: bool = True
) -> tuple[list[int], list[int], list[list[PoolMemory]]]: ...
def address_list(name: str, addrs: Sequence[int]) -> list[int]: ...

host_barrier_page_bytes: int

class HostBarrier(metaclass=_pybind11_type):
    def __init__(
        self,
        rank: int,
        fds: Sequence[int],
        pids: Sequence[int],
        names: Sequence[int] = (),
        group_size: int = 0,
    ) -> None: ...
    def meet(
        self,
        call: str,
        terms: Sequence[int],
        timeout: float,
        give_up: Callable[[], bool] | None = None,
    ) -> list[list[int]]: ...
    def leave(self, because_of: int = -1) -> None: ...
    def ended(self) -> list[int]: ...
    def loss(self) -> tuple[list[int], str, bool]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

@final
class TraceSpan(metaclass=_pybind11_type):
    def __init__(self, scope: TraceScope) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def start_trace(max_events: int) -> None: ...
def stop_trace() -> tuple[int, NDArray[np.void], list[tuple[str, int, int]], list[str]]: ...
def dtype_name(code: int) -> str: ...

@final
class ContextParallelMetadata(_Value):
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def strategy(self) -> str: ...
    @property
    def kv_len_convention(self) -> str: ...
    @property
    def weights(self) -> list[float] | None: ...
    @property
    def page_size(self) -> int | None: ...
    @property
    def per_rank_pairs(self) -> list[int]: ...
    @property
    def imbalance(self) -> float: ...
    @property
    def cp_rank(self) -> int: ...
    @property
    def cp_size(self) -> int: ...
    @property
    def bs(self) -> int: ...
    @property
    def total_seq_lens(self) -> int: ...
    @property
    def total_q_prev_tokens(self) -> int: ...
    @property
    def total_q_next_tokens(self) -> int: ...
    @property
    def max_seqlen_q_prev(self) -> int: ...
    @property
    def max_seqlen_q_next(self) -> int: ...
    @property
    def max_seqlen_q_combined(self) -> int | None: ...
    @property
    def prefix_lens(self) -> list[int]: ...
    @property
    def per_rank_actual_token(self) -> list[int]: ...
    @property
    def per_rank_logical_token(self) -> list[int] | None: ...
    @property
    def max_rank_len(self) -> list[int]: ...
    @property
    def split_list(self) -> list[int] | None: ...
    @property
    def zigzag_index(self) -> list[int] | None: ...
    @property
    def cp_reverse_index(self) -> list[int] | None: ...
    @property
    def reverse_split_len(self) -> list[int] | None: ...
    @property
    def kv_len_prev_list(self) -> list[int] | None: ...
    @property
    def kv_len_next_list(self) -> list[int] | None: ...
    @property
    def actual_seq_q_prev_list(self) -> list[int] | None: ...
    @property
    def actual_seq_q_next_list(self) -> list[int] | None: ...
    @property
    def kv_len_prev_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def kv_len_next_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def kv_len_combined_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def actual_seq_q_prev_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def actual_seq_q_next_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def actual_seq_q_combined_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def cu_seqlens_q_prev_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def cu_seqlens_q_next_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def cu_seqlens_q_combined_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def cu_seqlens_kv_prev_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def cu_seqlens_kv_next_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def cu_seqlens_kv_combined_tensor(self) -> NDArray[np.int32] | None: ...
    @property
    def local_q_indices(self) -> NDArray[np.int32]: ...
    @property
    def query_request_indices(self) -> NDArray[np.int32]: ...
    @property
    def query_cache_lengths(self) -> NDArray[np.int32]: ...
    def shard(self, x: _TensorT, dim: int = 0, *, truncate: bool = False) -> _TensorT: ...
    def unshard(self, parts: Sequence[_TensorT], dim: int = 0) -> _TensorT: ...
    def pad_to_physical(self) -> ContextParallelMetadata: ...
    def rows_per_request(self) -> list[int]: ...
    def shard_per_request(
        self,
    ) -> tuple[list[int], NDArray[np.int32], list[int], NDArray[np.int32]]: ...
    def to_dict(self) -> dict[str, int | str | list[int] | None]: ...
    def _gathered_row_indices(self) -> NDArray[np.int32]: ...
    def _logical_rows(self) -> list[int]: ...
    def _packed_tensors(self, alignment: int) -> tuple[NDArray[np.int32], list[int]]: ...

class PCPLayout(_Value):
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def pcp_size(self) -> int: ...
    @property
    def dcp_size(self) -> int: ...
    @property
    def shard_decode(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def padded_num_tokens(self) -> int: ...
    @property
    def per_rank_num_tokens(self) -> list[int]: ...
    @property
    def replicated(self) -> NDArray[np.bool_]: ...
    @property
    def segments(self) -> list[_RankSegments]: ...
    @property
    def seq_lens(self) -> list[_Ints]: ...
    @property
    def hidden_restore_idx(self) -> _Ints: ...
    @property
    def padded_gather_idx(self) -> _Ints: ...
    @property
    def gathered_kv_write_mask(self) -> NDArray[np.bool_]: ...
    def shard(self, x: _TensorT, pcp_rank: int, dim: int = 0) -> _TensorT: ...
    def unshard(self, parts: Sequence[_TensorT], dim: int = 0) -> _TensorT: ...
    def _local_q_indices(self, rank: int) -> _Ints: ...
    def _segments(self) -> list[tuple[_Ints, _Ints, _Ints, _Ints, _Ints]]: ...

LSE_BYTES: int

class HeadShare(_Bound):
    @property
    def q(self) -> slice: ...
    @property
    def kv(self) -> slice: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...

class LayerBytes(_Bound):
    def __init__(
        self, num_heads: int, num_kv_heads: int, query: int, key: int, output: int, merged: int, /
    ) -> None: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def query(self) -> int: ...
    @property
    def key(self) -> int: ...
    @property
    def output(self) -> int: ...
    @property
    def merged(self) -> int: ...

class HeldRows(_Bound):
    def __init__(
        self,
        tokens: _Indices,
        keys: _Indices,
        seen: _Indices,
        new_keys: _Indices,
        arriving: _Indices,
        /,
    ) -> None: ...
    @property
    def num_ranks(self) -> int: ...

class Exchange(_Bound):
    @property
    def needs_mesh(self) -> bool: ...
    @property
    def needs_even_heads(self) -> bool: ...
    @property
    def needs_shards(self) -> bool: ...
    @property
    def reads_in_place(self) -> bool: ...
    @property
    def writes(self) -> bool: ...
    @property
    def rounds_twice(self) -> bool: ...
    @property
    def sends_wanted_lse(self) -> bool: ...

def exchanges() -> dict[str, Exchange]: ...
def share_heads(num_heads: int, num_kv_heads: int, num_ranks: int, /) -> list[HeadShare]: ...
def split_shares(shares: list[HeadShare], num_parts: int, /) -> list[list[HeadShare]]: ...
def head_rounds(
    num_kv_heads: int,
    received_bytes: int,
    flops: float,
    most_rounds: int,
    least_bytes: int,
    most_flops_per_byte: float,
    most_heads: int | None,
    /,
) -> list[slice]: ...
def send_rows(rows: _Indices, row_bytes: int, by_ring: bool, /) -> tuple[_Ints, _Ints]: ...
def send_queries(
    tokens: _Indices, query_bytes: int, state_bytes: int, /
) -> tuple[_Ints, _Ints, _Ints, _Ints]: ...
def send_by_heads(
    tokens: _Indices,
    keys: _Indices,
    layer: LayerBytes,
    heads: _Indices,
    kv_heads: _Indices,
    result_bytes: int,
    /,
) -> tuple[_Ints, _Ints, _Ints, _Ints]: ...
def choose_exchange(
    held: HeldRows,
    layer: LayerBytes,
    mesh: _Indices | Sequence[Sequence[int]] | None,
    writes: bool,
    max_scratch_bytes: int,
    /,
) -> tuple[str, str, dict[str, int]]: ...
def choose_state_exchange(
    num_tokens: int, num_heads: int, output_bytes: int, num_ranks: int, all_heads: bool, /
) -> tuple[str, str, dict[str, int]]: ...
def choose_sparse_exchange(
    keys: _Indices,
    rows_per_rank: _Indices,
    visible: _Indices,
    sizes: Sequence[int],
    max_scratch_bytes: int,
    /,
) -> tuple[str, str, dict[str, int]]: ...
def plan_halo(
    metadata: ContextParallelMetadata | PCPLayout, window: int, ratio: int, rank: int | None, /
) -> tuple[
    list[int],
    list[int],
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
    _Ints,
]: ...
def plan_pending(
    metadata: ContextParallelMetadata | PCPLayout,
    window: int,
    ratio: int,
    keepers: _Indices | None,
    rank: int | None,
    /,
) -> tuple[list[int], list[int], _Ints, _Ints]: ...
def plan_units(
    metadata: ContextParallelMetadata | PCPLayout,
    ratio: int,
    block_tables: _Table,
    page_size: int,
    placement: Interleave | None,
    of_slots: bool,
    rank: int | None,
    /,
) -> tuple[list[int], list[int], _Ints, _Ints]: ...
def plan_relayout(
    source: ContextParallelMetadata, target: ContextParallelMetadata, /
) -> tuple[list[int], list[int], _Ints, _Ints]: ...
def restore_pcp_layout(state: tuple[Any, ...], /) -> PCPLayout: ...
def pcp_segments(
    extend_lens: _Indices,
    prefix_lens: _Indices,
    pcp_size: int,
    is_prefill: _Flags | None,
    shard_decode: bool,
    dcp_size: int,
    /,
) -> list[tuple[_Ints, _Ints, _Ints, _Ints, _Ints]]: ...
def build_pcp_layout(
    extend_lens: _Indices,
    prefix_lens: _Indices,
    pcp_size: int,
    is_prefill: _Flags | None,
    shard_decode: bool,
    dcp_size: int,
    padded_num_tokens: int | None,
    /,
) -> PCPLayout: ...
def restore_context_parallel_metadata(state: tuple[Any, ...], /) -> ContextParallelMetadata: ...
def build_cp_metadata(
    extend_lens: _Indices | None,
    seq_lens: _Indices | None,
    cp_rank: int,
    cp_size: int,
    strategy: str,
    num_tokens: int | None,
    kv_len_convention: str,
    compat: bool,
    weights: _Reals | None,
    page_size: int | None,
    /,
) -> ContextParallelMetadata: ...
def build_cp_metadata_all_ranks(
    extend_lens: _Indices | None,
    seq_lens: _Indices | None,
    cp_size: int,
    strategy: str,
    num_tokens: int | None,
    kv_len_convention: str,
    compat: bool,
    weights: _Reals | None,
    page_size: int | None,
    /,
) -> list[ContextParallelMetadata]: ...
def can_apply_cp(
    extend_lens: _Indices,
    cp_size: int,
    strategy: str,
    num_tokens: int | None,
    forward_mode: int | None,
    /,
) -> bool: ...
def can_dsa_prefill_cp_interleave(
    extend_lens: _Indices, cp_size: int, strategy: str, forward_mode: int | None, /
) -> bool: ...
def is_extend(mode: int, include_draft_extend_v2: bool, /) -> bool: ...
def is_context_parallel_extend(mode: int, include_draft_extend_v2: bool, /) -> bool: ...
def is_extend_without_speculative(mode: int, /) -> bool: ...
def is_extend_or_draft_extend_or_mixed(mode: int, /) -> bool: ...
def is_decode_or_idle(mode: int, /) -> bool: ...
def is_cpu_graph(mode: int, /) -> bool: ...
def is_cuda_graph(mode: int, /) -> bool: ...

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
    first_positions: _Indices | None,
    block_tables: _Indices,
    page_size: int,
    num_pages: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    causal: _Flags,
    window: _Window,
    custom_mask: _Tensor | None,
    packed_custom_mask: _Tensor | None,
    allow_short_kv: bool,
    batch_invariant: bool,
    precise: bool,
    num_threads: int | None,
) -> AttentionPlan: ...
def default_scale(function: str, head_dim: int) -> float: ...
def check_bias(
    score_bias: tuple[_ScoreBias, _Tensor | None, _Tensor | None],
    num_heads: int,
    q_lens: _Indices,
    kv_lens: _Indices,
) -> None: ...
def refuse_missing_scale(function: str, name: str) -> NoReturn: ...
def run_attention(
    plan: AttentionPlan,
    q: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    kv_layout: str,
    k_scale: SupportsFloat | _Tensor | None,
    v_scale: SupportsFloat | _Tensor | None,
    kv_dtype: str | None,
    scale: float | None,
    softcap: float,
    score_bias: tuple[_ScoreBias, _Tensor | None, _Tensor | None] | None,
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
    first_positions: _Indices | None,
    block_tables: _Indices | None,
    kv_indptr: _Indices | None,
    kv_indices: _Indices | None,
    last_page_len: _Indices | None,
    page_size: int | None,
    kv_layout: str,
    k_scale: SupportsFloat | _Tensor | None,
    v_scale: SupportsFloat | _Tensor | None,
    kv_dtype: str | None,
    scale: float | None,
    causal: _Flags,
    window: _Window,
    softcap: float,
    score_bias: tuple[Any, ...] | None,
    sinks: _Tensor | None,
    custom_mask: _Tensor | None,
    packed_custom_mask: _Tensor | None,
    allow_short_kv: bool,
    batch_invariant: bool,
    precise: bool,
    num_threads: int | None,
    out: _Tensor,
    lse: _Tensor | None,
    q_rope: _Tensor | None = None,
    k_rope: _Tensor | None = None,
    key_ranges: _Indices | None = None,
) -> None: ...
def do_cp_attn_fia(
    q: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor | None,
    metadata: ContextParallelMetadata,
    block_tables: _Indices,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: _Window,
    softcap: float,
    score_bias: tuple[_ScoreBias, _Tensor | None, _Tensor | None] | None,
    sinks: _Tensor | None,
    custom_mask: _Tensor | None,
    packed_custom_mask: _Tensor | None,
    q_rope: _Tensor | None,
    k_rope: _Tensor | None,
    v_head_dim: int | None,
    k_scale: SupportsFloat | _Tensor | None,
    v_scale: SupportsFloat | _Tensor | None,
    kv_dtype: str | None,
    precise: bool,
    out: _Tensor,
    lse: _Tensor | None,
) -> None: ...

_Range = tuple[int, int]

def kv_to_page_num(num_tokens: int, page_size: int, /) -> int: ...
def kv_to_page_indices(kv_indices: _Indices, page_size: int, /) -> NDArray[np.int32]: ...
def group_concurrent_contiguous(
    src_indices: _Indices, dst_indices: _Indices, /
) -> tuple[list[list[int]], list[list[int]]]: ...
def filter_kv_indices_for_shard_rank(
    kv_indices: _Indices, start: int, stop: int, shard_rank: int, shard_size: int, /
) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
def filter_kv_indices_for_cp_rank(
    num_pages: int,
    start: int,
    stop: int | None,
    total_pages: int,
    cp_rank: int,
    cp_size: int,
    /,
) -> _Range: ...
def get_layer_shard_range(rank: int, shard_size: int, total_layers: int, /) -> _Range: ...
def get_layer_owner(local_layer_idx: int, shard_size: int, total_layers: int, /) -> int: ...
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
    num_draft_entries: int | None,
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
def cp_sparse_mla(
    q: _Tensor,
    kv: _Tensor,
    index_q: _Tensor,
    index_k_cache: _Tensor,
    weights: _Tensor,
    metadata: ContextParallelMetadata,
    block_tables: _Indices,
    page_size: int,
    topk: int,
    sm_scale: float,
    d_v: int,
    attn_sink: _Tensor | None,
    prefix_lens: _Indices | None,
    index_k_scale: _Tensor | None,
    num_threads: int | None,
    out: _Tensor,
    max_logits: _Tensor,
    lse: _Tensor,
) -> None: ...
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
    values: _Tensor | None = None,
) -> None: ...
def select_blocks(
    score: _Tensor,
    lengths: _Indices,
    topk: int,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    dcp_rank: int,
    dcp_size: int,
    blocks: _Tensor,
    block_scores: _Tensor,
) -> None: ...
def merge_blocks(
    blocks: _Tensor,
    block_scores: _Tensor,
    topk: int,
    out_blocks: _Tensor,
    out_scores: _Tensor,
) -> None: ...
def dcp_local_indices(
    indices: _Tensor, dcp_rank: int, dcp_size: int, interleave_size: int, out: _Tensor
) -> None: ...
def merge_state(out_a: _Tensor, lse_a: _Tensor, out_b: _Tensor, lse_b: _Tensor) -> None: ...
def merge_states(
    outs: _Tensor | Sequence[_Tensor],
    lses: _Tensor | Sequence[_Tensor],
    sinks: _Tensor | None,
    out: _Tensor,
    lse: _Tensor,
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
    values: _Tensor | None = None,
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
        antiquant_scale: _Tensor | None,
        antiquant_offset: _Tensor | None,
        key_antiquant_scale: _Tensor | None,
        key_antiquant_offset: _Tensor | None,
        value_antiquant_scale: _Tensor | None,
        value_antiquant_offset: _Tensor | None,
        antiquant_mode: int,
        key_antiquant_mode: int,
        value_antiquant_mode: int,
    ) -> None: ...
    @property
    def out_shape(self) -> tuple[int, ...]: ...
    @property
    def lse_shape(self) -> tuple[int, ...]: ...
    def run(self, out: _Tensor, lse: _Tensor) -> None: ...

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
        shard_rank: int,
        shard_size: int,
    ) -> None: ...
    @property
    def _entries(
        self,
    ) -> list[tuple[int, str, bool, int, int, int, bool, str, int | None, str, str]]: ...
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
    @property
    def shard_rank(self) -> int: ...
    @property
    def shard_size(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

def digest_kv(
    layout: KVLayout,
    pages: _Indices,
    start: int,
    first_token: int | None,
    num_tokens: int | None,
    block_tokens: int | None,
    peer: KVLayout | None,
    num_threads: int | None,
) -> list[tuple[int, str, bool, str, int, int, NDArray[np.uint64]]]: ...
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
