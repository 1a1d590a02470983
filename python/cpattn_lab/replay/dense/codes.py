# SPDX-License-Identifier: Apache-2.0
"""Pools of 8 bits: the numbers of their codes, and the oracle's attention to these."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn import reference

from .model import DenseConfig

# Error units of the output, times attention over |values|: rounding the output and, in narrow
# dtypes, the weights, half a unit each, and a little for the sums; in float32 rounding of scores,
# which enter the weights.
_UNITS = {"bfloat16": 1.1, "float16": 1.1, "float32": 40.0}


def scales_of(pool: Any, layer: int) -> dict[str, Any]:
    """Return the scales for attention over the buffers of a layer."""
    if pool.scale_dtype is None:
        return {}
    return {
        "k_scale": pool.get_key_scale_buffer(layer),
        "v_scale": pool.get_value_scale_buffer(layer),
    }


def numbers_of(pool: Any, layer: int, pages: Any = slice(None)) -> tuple[Tensor, Tensor]:
    """Return exact keys and values of pages of a layer, float64 [pages, page_size, heads, dim]."""
    numbers = [buffer[pages].to(torch.float64) for buffer in pool.get_kv_buffer(layer)]
    scales = scales_of(pool, layer).values()
    for x, scale in zip(numbers, scales, strict=False):
        x *= scale[pages].to(torch.float64)[..., None]
    return numbers[0], numbers[1]


def error_over_codes(
    config: DenseConfig,
    pool: Any,
    layer: int,
    q: Tensor,
    out: Tensor,
    tables: npt.NDArray[np.int32],
    kv_lens: npt.NDArray[Any],
) -> float:
    """Return the error against the oracle on the same cache, in units of expected rounding.

    q, out : [rows, heads, head_dim]
    tables : [rows, pages], of the sequence of each row
    kv_lens : [rows], the number of visible keys of each row
    """
    if not len(q):
        return 0.0
    page_size = pool.page_size
    width = -(-int(kv_lens.max()) // page_size)
    own = np.arange(width) * page_size < np.asarray(kv_lens)[:, None]
    pages, local = np.unique(np.where(own, tables[:, :width], 0), return_inverse=True)
    k, v = (x.numpy() for x in numbers_of(pool, layer, torch.from_numpy(pages.astype(np.int64))))

    def attended(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        result, _ = reference.paged_attention(
            q, k, values,
            q_lens=[1] * len(q), kv_lens=kv_lens, block_tables=local.reshape(own.shape),
            scale=config.head_dim**-0.5,
        )  # fmt: skip
        return result

    dtype = torch.finfo(config.torch_dtype)
    size = np.maximum(attended(np.abs(v)), dtype.tiny)  # codes of zero are common
    errors = np.abs(out.double().numpy() - attended(v)) / (_UNITS[config.dtype] * dtype.eps * size)
    return float(np.where(np.isfinite(errors), errors, np.inf).max())
