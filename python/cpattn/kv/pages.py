# SPDX-License-Identifier: Apache-2.0
"""Writes and moves of rows in pages of an engine or of another library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat

from .. import _core
from .._types import Indices, Tensor


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
        ``page * page_size + offset`` of each token; -1 skips a token. If several tokens have the
        same slot, the last one counts.
    k, v : tensors [num_tokens, num_kv_heads, dim], float32, float16 or bfloat16
        Keys and values; `v` may have another dim.
    k_pages, v_pages : tensors [num_pages, page_size, num_kv_heads, dim]
        Caches in a form of `cpattn.paged_attention`, in the order of `kv_layout`, or [num_slots,
        num_kv_heads, dim]; any strides with a contiguous last dimension. Their dtype is that of
        `k`, or float8_e4m3fn or float8_e5m2.
    kv_layout : {"NHD", "HND"}
        Order of the axes of 4-D caches; "HND" is [num_pages, num_kv_heads, page_size, dim].
    k_scale, v_scale : float
        Scales of codes: a code stands for code * scale, and is the nearest one to number / scale,
        or the largest. Pages of the dtype of `k` receive copies, without scale.

    Raises
    ------
    TypeError
        If an argument is no tensor or has another dtype.
    ValueError
        If the pages lack a slot, shapes do not fit, a scale is not positive, or rows overlap pages.
        Nothing is written then.

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

    Afterwards slot ``targets[i]`` has the former row of slot ``sources[i]``, for any order of the
    pairs: rows may swap, as when a pool is compacted, and one row may go to several slots, as when
    a tree of drafts branches.

    Parameters
    ----------
    sources, targets : ints [num_rows]
        Slots ``page * page_size + offset``. A pair with a -1 is skipped; targets differ.
    caches : list or tuple of tensors
        [num_pages, page_size, num_kv_heads, dim], in the order of `kv_layout`, or [num_slots,
        num_kv_heads, dim], of any dtype and strides with a contiguous last dimension: for example
        the keys and values of all layers.
    kv_layout : {"NHD", "HND"}
        Order of the axes of 4-D caches.

    Raises
    ------
    TypeError
        If `caches` is no list of tensors, or slots are no ints.
    ValueError
        If a cache lacks a slot, a target or cache comes twice, or lists differ in length. Nothing
        is written then.

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
