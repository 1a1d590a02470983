# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache of a layer as two caches of pages."""

from __future__ import annotations

import torch

# Rows are copied as items of 16 bytes, up to 8 times fewer, where memory is made of such.
_WORD = torch.complex128


class PagedCache:
    """Keys and values of a layer, views of vLLM's tensor.

    Parameters
    ----------
    tensor : tensor, shape [num_blocks, num_kv_heads, block_size, 2 * head_size]

    Attributes
    ----------
    k, v : tensors, shape [num_blocks, num_kv_heads, block_size, head_size]
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        num_blocks, num_kv_heads, self._block_size, width = tensor.shape
        both = tensor.view(num_blocks, num_kv_heads, 2 * self._block_size, width // 2)
        self.k, self.v = both[:, :, : self._block_size], both[:, :, self._block_size :]
        self._item = _WORD if _is_made_of_words(both) else tensor.dtype
        self._k_tokens, self._v_tokens = (
            x.view(self._item).transpose(1, 2) for x in (self.k, self.v)
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the rows of tokens.

        Parameters
        ----------
        key, value : tensors of the cache's dtype, shape [>= num_tokens, num_kv_heads, head_size]
        slots : int64 tensor, shape [num_tokens]
            block * block_size + offset of each token, or -1 for one that is not kept.
        """
        if len(slots) != len(key):
            key, value = key[: len(slots)], value[: len(slots)]
        kept = slots >= 0
        if not kept.all():
            key, value, slots = key[kept], value[kept], slots[kept]
        index = slots // self._block_size, slots % self._block_size
        self._k_tokens[index] = self._items(key)
        self._v_tokens[index] = self._items(value)

    def _items(self, rows: torch.Tensor) -> torch.Tensor:
        if self._item is _WORD and not _is_made_of_words(rows):
            rows = rows.clone(memory_format=torch.contiguous_format)
        return rows.view(self._item)


def _is_made_of_words(x: torch.Tensor) -> bool:
    per_word = _WORD.itemsize // x.element_size()
    steps = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(step % per_word for step in steps)
