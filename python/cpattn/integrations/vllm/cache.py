# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache of a layer as two caches of pages."""

from __future__ import annotations

import torch

_WORD = torch.complex128  # 16 bytes: rows are multiples of it, copied in eight times fewer steps


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_blocks, num_kv_heads, block_size, head_size] of a cache, as views."""
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    both = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, width // 2)
    return both[:, :, :block_size], both[:, :, block_size:]


def write_rows(
    kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the rows of tokens to the cache.

    Parameters
    ----------
    kv_cache : tensor, shape [num_blocks, num_kv_heads, block_size, 2 * head_size]
    key, value : tensors of its dtype, shape [>= num_tokens, num_kv_heads, head_size]
    slots : int64 tensor, shape [num_tokens]
        block * block_size + offset of each token, or -1 for one that is not kept.
    """
    rows = len(slots)
    key, value = key[:rows], value[:rows]
    kept = slots >= 0
    if not kept.all():
        key, value, slots = key[kept], value[kept], slots[kept]
    block_size = kv_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for cache, new in zip(split_cache(kv_cache), (key, value), strict=True):
        _words(cache).transpose(1, 2)[blocks, offsets] = _words(new)


def _words(x: torch.Tensor) -> torch.Tensor:
    per_word = _WORD.itemsize // x.element_size()
    if any(step % per_word for step in (x.storage_offset(), *x.stride()[:-1])):
        x = x.contiguous()
    return x.view(_WORD)
