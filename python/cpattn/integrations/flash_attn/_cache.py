# SPDX-License-Identifier: Apache-2.0
"""Caches that new tokens are written into."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._visibility import Lengths
from ._attend import WindowSize, attend_batch, check_axes, check_supported


def _append(
    k_cache: AnyTensor, v_cache: AnyTensor, k: AnyTensor, v: AnyTensor, table: Any, lengths: Lengths
) -> None:
    """Write new tokens behind those in the pages."""
    import torch

    name = "flash_attn_with_kvcache"
    for argument, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = [len(table), k.shape[1], *cache.shape[2:]]
        if list(new.shape) != expected:
            raise ValueError(
                f"{name}: {argument} must have shape {expected}, got {list(new.shape)}"
            )
        if cache.element_size() == 1 and new.dtype != cache.dtype:
            raise ValueError(
                f"{name}: {argument} must be codes like those of the cache, {cache.dtype}, "
                f"got {new.dtype}"
            )
    page_size = k_cache.shape[1]
    position = lengths[:, None] + np.arange(k.shape[1])
    last = int(position.max(initial=-1)) // page_size
    if last >= table.shape[1]:
        raise ValueError(
            f"{name}: k needs room for {int(position.max()) + 1} tokens, the "
            f"cache of a sequence has {table.shape[1] * page_size}"
        )
    pages = np.take_along_axis(table, position // page_size, 1)
    if np.any(pages < 0) or np.any(pages >= len(k_cache)):
        raise ValueError(
            f"{name}: pages of new tokens must be in [0, {len(k_cache)}), got "
            f"{pages.min()} to {pages.max()}"
        )
    at = torch.from_numpy(pages), torch.from_numpy(position % page_size)
    if k_cache.element_size() == 1:  # torch does not index float8
        k_cache, v_cache, k, v = (x.view(torch.uint8) for x in (k_cache, v_cache, k, v))
    k_cache[at], v_cache[at] = k, v


def flash_attn_with_kvcache(
    q: AnyTensor,
    k_cache: AnyTensor,
    v_cache: AnyTensor,
    k: AnyTensor | None = None,
    v: AnyTensor | None = None,
    rotary_cos: AnyTensor | None = None,
    rotary_sin: AnyTensor | None = None,
    cache_seqlens: AnyTensor | int | None = None,
    cache_batch_idx: AnyTensor | None = None,
    cache_leftpad: AnyTensor | None = None,
    block_table: AnyTensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: AnyTensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: AnyTensor | float | None = None,
    v_descale: AnyTensor | float | None = None,
) -> Any:
    """Attention over a cache, after appending new keys and values to it in place.

    Parameters
    ----------
    q : tensor, shape [batch, tokens, heads, head_dim]
    k_cache, v_cache : tensors, shape [cache_batch, capacity, kv_heads, head_dim]
        With ``block_table``: [num_pages, page_size, kv_heads, head_dim], any page size.
    k, v : tensors, shape [batch, new_tokens, kv_heads, head_dim], optional
        Codes like those of the cache, if it is of codes.
    cache_seqlens : int or int tensor, shape [batch]
        Tokens in the cache without the new ones; default: all that it has room for.
    cache_batch_idx : int tensor, shape [batch], optional
        The row of the cache that each sequence has; not together with ``block_table``.
    rotary_cos, rotary_sin, cache_leftpad
        Must be None.
    rotary_interleaved
        Has no meaning without ``rotary_cos`` and ``rotary_sin``.
    block_table : int tensor, shape [batch, pages], optional
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    return_softmax_lse : bool
        Whether to return the LSE, too.
    num_splits : int
        1 keeps the keys of a row together, bitwise the same in any batch; else as is fastest.
    k_descale, v_descale : float or tensor, optional
        Scales as in `flash_attn_func`.

    Returns
    -------
    out : tensor, shape [batch, tokens, heads, head_dim]
    softmax_lse : float32 tensor, shape [batch, heads, tokens], with ``return_softmax_lse``

    Raises
    ------
    TypeError, ValueError
        As `flash_attn_func`, for new tokens without `cache_seqlens`, and lengths beyond the cache.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.ones(2, 1, 4, 16), torch.zeros(2, 8, 1, 16)
    >>> new = torch.ones(2, 1, 1, 16)
    >>> flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3).shape
    torch.Size([2, 1, 4, 16])
    """
    name = "flash_attn_with_kvcache"
    check_supported(
        name, q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
    )  # fmt: skip
    check_axes(name, "batch tokens heads dim", q=q)
    check_axes(name, "num_pages page_size kv_heads dim", k_cache=k_cache, v_cache=v_cache)
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{name}: cache_seqlens must be given with k")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(f"{name}: cache_batch_idx must not be given with block_table")
    batch = len(q)
    rows = np.arange(batch) if cache_batch_idx is None else np.asarray(cache_batch_idx, np.int64)
    table = rows[:, None] if block_table is None else np.asarray(block_table)
    if cache_seqlens is None:
        cache_seqlens = table.shape[1] * k_cache.shape[1]
    lengths = np.asarray(cache_seqlens, np.int64)
    if lengths.shape not in ((), (batch,)) or np.any(lengths < 0) or len(table) != batch:
        raise ValueError(
            f"{name}: cache_seqlens and the rows of the cache must be {batch} numbers >= 0, got "
            f"{lengths} and {len(table)} rows"
        )
    lengths = np.broadcast_to(lengths, (batch,))
    if k is not None:
        check_axes(name, "batch new_tokens kv_heads dim", k=k, v=v)
        _append(k_cache, v_cache, k, v, table, lengths)
        lengths = lengths + k.shape[1]
    out, lse = attend_batch(
        name, q, k_cache, v_cache, lengths, table,
        softmax_scale, causal, window_size, softcap, num_splits == 1,
        k_descale=k_descale, v_descale=v_descale, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
