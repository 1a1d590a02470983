# SPDX-License-Identifier: Apache-2.0
"""Writes into pages that belong to somebody else: an engine, or a pool of another library."""

from __future__ import annotations

from typing import SupportsFloat

from .. import _core
from .._types import Indices, Tensor

__all__ = ["write_pages"]


def write_pages(
    slots: Indices,
    k: Tensor,
    k_pages: Tensor,
    v: Tensor,
    v_pages: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: SupportsFloat = 1.0,
    v_scale: SupportsFloat = 1.0,
) -> None:
    """Write keys and values of tokens into pages in place.

    Parameters
    ----------
    slots : ints [num_tokens]
        ``page * page_size + offset`` of each token; -1 for one that is not written. Of tokens for
        one slot the last one counts.
    k, v : tensors [num_tokens, num_kv_heads, dim], float32, float16 or bfloat16
        Keys and values; `v` may have another dim.
    k_pages, v_pages : tensors [num_pages, page_size, num_kv_heads, dim]
        Caches as `cpattn.paged_attention` reads them: as by `kv_layout`, or [num_slots,
        num_kv_heads, dim]. Any strides with a contiguous last dimension. Of the dtype of `k`, or of
        codes, float8_e4m3fn or float8_e5m2.
    kv_layout : {"NHD", "HND"}
        The order of the axes of caches with four; "HND" is [num_pages, num_kv_heads, page_size,
        dim].
    k_scale, v_scale : float
        Factors that codes stand for: a code is the nearest to number / scale, and the largest one
        for what is beyond it.

    Raises
    ------
    TypeError
        For what is no tensor, or of another dtype.
    ValueError
        For slots that the pages do not have, shapes that do not fit, scales that are not positive,
        and rows that lie where pages do. Nothing is written then.

    Examples
    --------
    >>> import numpy as np
    >>> from cpattn.kv import write_pages
    >>> k_pages, v_pages = np.zeros((2, 3, 4, 1, 2), np.float32)     # three pages of four tokens
    >>> rows = np.ones((2, 1, 2), np.float32)
    >>> write_pages([9, -1], rows, k_pages, 2 * rows, v_pages)
    >>> k_pages[2, 1], v_pages[2, 1], float(k_pages.sum())
    (array([[1., 1.]], dtype=float32), array([[2., 2.]], dtype=float32), 2.0)
    """
    _core.write_pages(slots, k, k_pages, v, v_pages, kv_layout, k_scale, v_scale)
