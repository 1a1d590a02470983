# SPDX-License-Identifier: Apache-2.0
"""KV pool of sparse attention over FP8 rows: latents of 656 bytes, and index keys."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._arguments import at_least
from .._containers import tensor_of
from .._types import AnyTensor, Indices, Tensor
from ..sparse.index_k import write_index_k_cache
from ..sparse.kv_rows import ROW_BYTES, quantize_kv_rows
from .buffers import IndexedKVPool, Memory, Rows

LATENT_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128
INDEX_BYTES = INDEX_DIM + 4  # codes of a key, and its scale
FORMAT = "fp8_ds_mla"


class DSATokenToKVPool(IndexedKVPool):
    """KV pool with latent keys as rows of 656 bytes, and index keys as pages of codes and scales.

    Sparse attention reads both in place. Rows are those of `cpattn.sparse.quantize_kv_rows`: 512
    e4m3fn codes, four scales, and 64 bfloat16 numbers of the rotary part. Pages of index keys are
    those of `cpattn.sparse.write_index_k_cache`. Slots, page 0, memory and layers are as in
    `MHATokenToKVPool`.

    Parameters
    ----------
    size, page_size, num_layers : int
        The arguments of `MHATokenToKVPool`.
    index_head_dim : int, optional
        128 for a pool with index keys, uint8 [num_layers, P, page_size * 132].
    start_layer, container, memory
        See `MHATokenToKVPool`.

    Attributes
    ----------
    dtype : str
        "fp8_ds_mla".
    kinds : tuple of str
        ("k", "index_k"), or ("k",) without an indexer.

    Raises
    ------
    TypeError, ValueError, MemoryError
        See `MHATokenToKVPool`.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> pool = cpattn.kv.DSATokenToKVPool(
    ...     size=64, page_size=16, num_layers=2, index_head_dim=128, container="numpy")
    >>> pool.set_kv_buffer(0, [16, 17], np.ones((2, 576), np.float32))
    >>> pool.set_index_k_buffer(0, [16, 17], np.ones((2, 128), np.float32))
    >>> pool.get_key_buffer(0).shape, pool.get_index_k_buffer(0).shape
    ((5, 16, 1, 656), (5, 2112))
    >>> pool.get_contiguous_buf_infos()[2]     # bytes of a page
    [10496, 10496, 2112, 2112]
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        num_layers: int,
        index_head_dim: int | None = None,
        start_layer: int = 0,
        container: str | None = None,
        memory: Memory | None = None,
    ):
        function = type(self).__name__
        self.num_kv_heads = 1
        self.kv_lora_rank, self.qk_rope_head_dim = LATENT_DIM, ROPE_DIM
        self.index_head_dim = None
        rows = {"k": Rows((1, ROW_BYTES), "uint8", format=FORMAT)}
        if index_head_dim is not None:
            self.index_head_dim = at_least(1, index_head_dim, function, "index_head_dim")
            if self.index_head_dim != INDEX_DIM:
                raise ValueError(
                    f"{function}: index_head_dim must be {INDEX_DIM} or None, got {index_head_dim}"
                )
            rows["index_k"] = Rows((1, INDEX_BYTES), "uint8", in_pages=True, format=FORMAT)
        super().__init__(
            rows, size, page_size, num_layers, FORMAT, start_layer, False, container, memory
        )

    def set_kv_buffer(
        self,
        layer_id: Any,
        loc: Indices,
        k: Tensor,
        v: Tensor | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Quantise latent keys as `cpattn.sparse.quantize_kv_rows` and write them to their slots.

        Parameters
        ----------
        layer_id, loc, layer_id_override
            See `MHATokenToKVPool.set_kv_buffer`.
        k : tensor [num_tokens, 512] or [num_tokens, 1, 512], float32, float16 or bfloat16
            Latent keys. Width 576 includes the rotary part; uint8 of width 656 has finished rows to
            copy.
        v : tensor [num_tokens, 64] or [num_tokens, 1, 64], optional
            Rotary part, of the dtype of `k`.

        Raises
        ------
        ValueError
            If the pool lacks the layer or a slot, or tensors do not fit; nothing is written then.
        """
        function = "set_kv_buffer"
        layer = self._layer_index(
            function, layer_id if layer_id_override is None else layer_id_override
        )
        rows = self._rows_of(function, k, v)
        num_rows, num_slots = len(rows), _core.index_count(loc, function, "loc")
        if num_rows != num_slots:
            raise ValueError(
                f"{function}: k must have a row for each of {num_slots} slots, got {num_rows}"
            )
        _core.set_kv_rows(layer, loc, self._buffers["k"], rows)

    @staticmethod
    def _rows_of(function: str, k: Tensor, v: Tensor | None) -> AnyTensor:
        """Return rows of 656 bytes, one for each token."""
        widths = (LATENT_DIM + ROPE_DIM, ROW_BYTES) if v is None else (LATENT_DIM,)
        shape = _core.shape_of(k, function, "k")
        if len(shape) not in (2, 3) or shape[1:-1] not in ((), (1,)) or shape[-1] not in widths:
            raise ValueError(
                f"{function}: k must be [num_tokens, {' or '.join(map(str, widths))}]"
                f"{' without v' if v is None else ' with v'}, got shape {list(shape)}"
            )
        tensor = tensor_of(k, function, "k")
        if v is not None:
            return quantize_kv_rows(tensor, v)
        if shape[-1] != ROW_BYTES:
            return quantize_kv_rows(tensor[..., :LATENT_DIM], tensor[..., LATENT_DIM:])
        if (dtype := _core.dtype_of(k, function, "k")) != "uint8":
            raise ValueError(f"{function}: k must be uint8 if it is {ROW_BYTES} wide, got {dtype}")
        return tensor

    def set_index_k_buffer(
        self, layer_id: Any, loc: Indices, index_k: Tensor, k_scale: Tensor | None = None
    ) -> None:
        """Write index keys, with the arguments of `cpattn.sparse.write_index_k_cache`."""
        cache = self._of_layer("set_index_k_buffer", "index_k", layer_id)
        write_index_k_cache(cache, loc, index_k, k_scale)
