# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache of a layer as two caches of pages."""

from __future__ import annotations

import torch

from ...kv import write_pages

# vLLM's names for cache types with codes.
CODES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class PagedCache:
    """Keys and values of a layer, as views of vLLM's tensor.

    Parameters
    ----------
    tensor : tensor, shape [num_blocks, num_kv_heads, block_size, 2 * head_size]
        Cache of the model's dtype, or of bytes of codes.
    code : dtype of torch, optional
        Dtype of the codes.

    Attributes
    ----------
    k, v : tensors, shape [num_blocks, num_kv_heads, block_size, head_size]
    """

    def __init__(self, tensor: torch.Tensor, code: torch.dtype | None = None) -> None:
        self.tensor = tensor
        num_blocks, num_kv_heads, block_size, width = tensor.shape
        both = tensor.view(num_blocks, num_kv_heads, 2 * block_size, width // 2)
        self.k, self.v = both.view(code or tensor.dtype).split(block_size, dim=2)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the rows of tokens; codes are the nearest ones to row / scale.

        Numbers beyond the largest code saturate, NaN stays NaN.

        Parameters
        ----------
        key, value : tensors of the model's dtype, shape [>= num_tokens, num_kv_heads, head_size]
        slots : int64 tensor, shape [num_tokens]
            block * block_size + offset of each token; -1 skips a token.
        k_scale, v_scale : float
            Scales of codes; unused for other caches.
        """
        rows = len(slots)
        write_pages(
            slots, key[:rows], self.k, value[:rows], self.v, kv_layout="HND", k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip
