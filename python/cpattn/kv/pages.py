# SPDX-License-Identifier: Apache-2.0
"""Writes and moves in pages that belong to somebody else: an engine, or another library's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat

from .. import _core
from .._types import Indices, Tensor

__all__ = ["move_rows", "write_pages"]


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
        ``page * page_size + offset`` of each token; -1 for one that is not written. The last of
        several tokens for one slot counts.
    k, v : tensors [num_tokens, num_kv_heads, dim], float32, float16 or bfloat16
        Keys and values; `v` may have another dim.
    k_pages, v_pages : tensors [num_pages, page_size, num_kv_heads, dim]
        Caches as `cpattn.paged_attention` reads them, in the order of `kv_layout`, or [num_slots,
        num_kv_heads, dim]; any strides with a contiguous last dimension. Their dtype is that of
        `k`, or float8_e4m3fn or float8_e5m2.
    kv_layout : {"NHD", "HND"}
        The order of the axes of caches with four; "HND" is [num_pages, num_kv_heads, page_size,
        dim].
    k_scale, v_scale : float
        A code stands for code * scale: it is the nearest to number / scale, or the largest one.
        Pages of the dtype of `k` are copies, and have no scale.

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


def move_rows(
    sources: Indices, targets: Indices, caches: Sequence[Tensor], *, kv_layout: str = "NHD"
) -> None:
    """Move rows of tokens within each of several caches, all at once.

    Afterwards slot ``targets[i]`` has what slot ``sources[i]`` had before, whatever the order of
    the pairs: rows may change places, as in a pool that is made compact, and one row may go to
    several slots, as where a tree of drafts branches.

    Parameters
    ----------
    sources, targets : ints [num_rows]
        Slots ``page * page_size + offset``. A pair with a -1 is skipped; targets differ.
    caches : list or tuple of tensors
        [num_pages, page_size, num_kv_heads, dim], in the order of `kv_layout`, or [num_slots,
        num_kv_heads, dim], of any dtype and any strides with a contiguous last dimension: the keys
        and values of all layers.
    kv_layout : {"NHD", "HND"}
        The order of the axes of caches with four.

    Raises
    ------
    TypeError
        For what is no list of tensors, and slots that are no ints.
    ValueError
        For slots that a cache does not have, a target or a cache that comes twice, and lists of
        different lengths. Nothing is written then.

    Examples
    --------
    >>> import numpy as np
    >>> from cpattn.kv import move_rows
    >>> cache = np.arange(6.0, dtype=np.float32).reshape(6, 1, 1)     # six slots
    >>> move_rows([0, 1, 5], [1, 0, 3], [cache])
    >>> cache.ravel()
    array([1., 0., 2., 5., 4., 5.], dtype=float32)
    """
    _core.move_rows(sources, targets, caches, kv_layout)
