# SPDX-License-Identifier: Apache-2.0
"""KV pool of multi-head latent attention, with or without index keys."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._arguments import at_least
from .._types import Indices, Tensor
from .buffers import CODES, NUMBERS, IndexedKVPool, Memory, Rows, dtype_name, fia_layout


class MLATokenToKVPool(IndexedKVPool):
    """KV pool with latent keys of multi-head latent attention, their rotary part, and index keys.

    It works like `MHATokenToKVPool`, with one layout: [num_layers, P, page_size, 1, width].

    Parameters
    ----------
    size, page_size, num_layers : int
        The arguments of `MHATokenToKVPool`.
    kv_lora_rank : int
        Width of `k_buffer`.
    qk_rope_head_dim : int
        Width of `v_buffer`.
    index_head_dim : int, optional
        Width of `index_k_buffer`; without it the buffer is None.
    dtype, start_layer, container, memory
        See `MHATokenToKVPool`.
    use_fia : bool, optional
        Accepted for symmetry; there is one layout.

    Raises
    ------
    TypeError, ValueError, MemoryError
        See `MHATokenToKVPool`.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> pool = cpattn.kv.MLATokenToKVPool(
    ...     size=64, page_size=8, num_layers=2, kv_lora_rank=16, qk_rope_head_dim=8,
    ...     dtype="float32", container="numpy")
    >>> latent = np.ones((2, 24), np.float32)     # both parts of a key, side by side
    >>> pool.set_kv_buffer(0, [8, 9], latent)
    >>> [buffer.shape for buffer in pool.get_kv_buffer(0)]
    [(9, 8, 1, 16), (9, 8, 1, 8)]
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        index_head_dim: int | None = None,
        dtype: Any = "bfloat16",
        start_layer: int = 0,
        use_fia: bool | None = None,
        container: str | None = None,
        memory: Memory | None = None,
    ):
        function = type(self).__name__
        self.num_kv_heads = 1
        self.kv_lora_rank = at_least(1, kv_lora_rank, function, "kv_lora_rank")
        self.qk_rope_head_dim = at_least(1, qk_rope_head_dim, function, "qk_rope_head_dim")
        self.head_dim, self.v_head_dim = self.kv_lora_rank, self.qk_rope_head_dim
        self.index_head_dim = None
        dtype = dtype_name(function, "dtype", dtype, (*NUMBERS, *CODES))
        rows = {
            "k": Rows((1, self.kv_lora_rank), dtype),
            "v": Rows((1, self.qk_rope_head_dim), dtype),
        }
        if index_head_dim is not None:
            self.index_head_dim = at_least(1, index_head_dim, function, "index_head_dim")
            rows["index_k"] = Rows((1, self.index_head_dim), dtype)
        if use_fia is not None:
            fia_layout(function, use_fia)
        super().__init__(
            rows, size, page_size, num_layers, dtype, start_layer, False, container, memory
        )

    def set_kv_buffer(
        self,
        layer_id: Any,
        loc: Indices,
        k: Tensor,
        v: Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write latent keys and their rotary part, as `MHATokenToKVPool.set_kv_buffer` does.

        Without `v`, the last dimension of `k` has both, kv_lora_rank + qk_rope_head_dim wide.
        """
        self._set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale, layer_id_override)

    def set_index_k_buffer(self, layer_id: Any, loc: Indices, index_k: Tensor) -> None:
        """Write index keys, num_tokens * index_head_dim elements, as `set_kv_buffer` does."""
        index = self._index_of("set_index_k_buffer", "index_k", layer_id)
        _core.set_index_k_buffer(index, loc, self._buffers["index_k"], index_k)
