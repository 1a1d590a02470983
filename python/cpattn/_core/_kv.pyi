# Buffers of KV pools.
import numpy as np
from numpy.typing import NDArray

from .._types import Tensor as _Tensor
from ._shared import _Bound, _Indices

class KVBuffer(_Bound):
    def __init__(
        self, function: str, num_layers: int, num_slots: int, row_elements: int, dtype: str
    ) -> None: ...
    @property
    def bytes(self) -> NDArray[np.uint8]: ...
    @property
    def addr(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...

def set_kv_buffer(
    layer: int,
    loc: _Indices,
    k_buffer: KVBuffer,
    k: _Tensor,
    k_scale: float,
    v_buffer: KVBuffer,
    v: _Tensor | None,
    v_scale: float,
) -> None: ...
def set_index_k_buffer(layer: int, loc: _Indices, buffer: KVBuffer, index_k: _Tensor) -> None: ...

class PoolMemory(_Bound): ...
