# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache of a layer as two caches of pages."""

from __future__ import annotations

import torch

# What vLLM calls the types of caches whose bytes are codes.
CODES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Rows are copied as items of 16 bytes, up to 8 times fewer, where memory is made of such.
_WORD = torch.complex128


class PagedCache:
    """Keys and values of a layer, views of vLLM's tensor.

    Parameters
    ----------
    tensor : tensor, shape [num_blocks, num_kv_heads, block_size, 2 * head_size]
        Of the model's dtype, or bytes of codes.
    code : dtype of torch, optional
        What the codes are.

    Attributes
    ----------
    k, v : tensors, shape [num_blocks, num_kv_heads, block_size, head_size]
    """

    def __init__(self, tensor: torch.Tensor, code: torch.dtype | None = None) -> None:
        self.tensor = tensor
        self._code = code
        num_blocks, num_kv_heads, self._block_size, width = tensor.shape
        both = tensor.view(num_blocks, num_kv_heads, 2 * self._block_size, width // 2)
        self._item = _WORD if _is_made_of_words(both) else tensor.dtype
        tokens = both.view(self._item).transpose(1, 2)
        self._k_tokens, self._v_tokens = tokens.split(self._block_size, dim=1)
        self.k, self.v = both.view(code or tensor.dtype).split(self._block_size, dim=2)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the rows of tokens, as codes of what is left after division by a scale.

        Parameters
        ----------
        key, value : tensors of the model's dtype, shape [>= num_tokens, num_kv_heads, head_size]
        slots : int64 tensor, shape [num_tokens]
            block * block_size + offset of each token, or -1 for one that is not kept.
        k_scale, v_scale : float
            Of codes; other caches have none.
        """
        if len(slots) != len(key):
            key, value = key[: len(slots)], value[: len(slots)]
        kept = slots >= 0
        if not kept.all():
            key, value, slots = key[kept], value[kept], slots[kept]
        index = slots // self._block_size, slots % self._block_size
        self._k_tokens[index] = self._items(key, k_scale)
        self._v_tokens[index] = self._items(value, v_scale)

    def _items(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        if self._code is not None:
            rows = _quantized(rows, scale, self._code).view(self.tensor.dtype)
        if self._item is _WORD and not _is_made_of_words(rows):
            rows = rows.clone(memory_format=torch.contiguous_format)
        return rows.view(self._item)


def _quantized(rows: torch.Tensor, scale: float, code: torch.dtype) -> torch.Tensor:
    """Codes nearest to rows / scale; what is too large is the largest, NaN stays NaN."""
    if scale != 1.0:
        rows = rows.float() / scale
    most = torch.finfo(code).max
    return rows.clamp(-most, most).to(code, memory_format=torch.contiguous_format)


def _is_made_of_words(x: torch.Tensor) -> bool:
    per_word = _WORD.itemsize // x.element_size()
    steps = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(step % per_word for step in steps)
