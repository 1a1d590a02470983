# SPDX-License-Identifier: Apache-2.0
"""Caches that new tokens are written into."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._ragged import RaggedPages
from .._visibility import Lengths
from ._attend import WindowSize, attend_batch, check_axes, check_supported, left_padding, window_of
from ._rotary import Rotary


def _places(
    k_cache: AnyTensor, v_cache: AnyTensor, k: AnyTensor, v: AnyTensor, table: Any, lengths: Lengths
) -> tuple[AnyTensor, AnyTensor]:
    """Return pages and slots of new tokens after the cached ones; pages must have room."""
    import torch

    name = "flash_attn_with_kvcache"
    for argument, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = [len(table), k.shape[1], *cache.shape[2:]]
        if list(new.shape) != expected:
            raise ValueError(
                f"{name}: {argument} must have shape {expected}, got {list(new.shape)}"
            )
        if new.dtype != cache.dtype:
            raise ValueError(
                f"{name}: {argument} must be {cache.dtype} as the cache is, got {new.dtype}"
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
    return torch.from_numpy(pages), torch.from_numpy(position % page_size)


def _write(cache: AnyTensor, at: tuple[AnyTensor, AnyTensor], new: AnyTensor) -> None:
    if cache.element_size() == 1:  # torch does not index float8
        import torch

        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    cache[at] = new


def _tokens_apart(cache: AnyTensor) -> int:
    """Return the distance of two rows of a cache in tokens; 0 if it is no whole number."""
    if len(cache) == 1:
        return max(1, cache.shape[1])
    row, token = cache.stride()[:2]
    return row // token if token > 0 and row % token == 0 else 0


def _padded(
    k_cache: AnyTensor, v_cache: AnyTensor, rows: Lengths, leftpad: Lengths, kv_lens: Lengths
) -> tuple[AnyTensor, AnyTensor, Lengths]:
    """Return pages of keys and values that start after the padding, and their table."""
    name, (num_rows, capacity) = "flash_attn_with_kvcache", k_cache.shape[:2]
    apart = _tokens_apart(k_cache)
    if v_cache.shape[:2] != k_cache.shape[:2] or _tokens_apart(v_cache) != apart or apart == 0:
        raise ValueError(
            f"{name}: with cache_leftpad k_cache and v_cache must have as many rows, each as many "
            f"whole tokens behind the last, got shapes {list(k_cache.shape)} and "
            f"{list(v_cache.shape)} with strides {k_cache.stride()} and {v_cache.stride()}"
        )
    if np.any((rows < 0) | (rows >= num_rows) | (leftpad + kv_lens > capacity)):
        raise ValueError(
            f"{name}: cache_batch_idx must be in [0, {num_rows}) and cache_seqlens at most "
            f"{capacity}, got {rows} and {leftpad + kv_lens}"
        )
    num_tokens = (num_rows - 1) * apart + capacity
    pages = RaggedPages(rows * apart + leftpad, kv_lens, num_tokens)
    k_pages, v_pages = (
        pages.of(x.as_strided((num_tokens, *x.shape[2:]), x.stride()[1:]))
        for x in (k_cache, v_cache)
    )
    return k_pages, v_pages, pages.block_tables


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
    s_aux: AnyTensor | None = None,
) -> Any:
    """Attention over a cache, after appending new keys and values to it in place.

    Parameters
    ----------
    q : tensor, shape [batch, tokens, heads, head_dim]
    k_cache, v_cache : tensors, shape [cache_batch, capacity, kv_heads, head_dim]
        With ``block_table``: [num_pages, page_size, kv_heads, head_dim], any page size.
    k, v : tensors, shape [batch, new_tokens, kv_heads, head_dim], optional
        New keys and values to append; codes of the cache's type if the cache has codes.
    cache_seqlens : int or int tensor, shape [batch]
        Tokens in the cache without the new ones; default: its capacity.
    cache_batch_idx : int tensor, shape [batch], optional
        Row of the cache for each sequence; not together with ``block_table``.
    cache_leftpad : int tensor, shape [batch], optional
        First token of each cache row that is a key; not together with ``block_table``.
    rotary_cos, rotary_sin : tensors of floats, shape [num_positions, rotary_dim / 2], optional
        Rotation of the first rotary_dim elements of new keys, at positions cache_seqlens,
        cache_seqlens + 1 and so on, and of queries, at the same positions with ``causal`` or a
        window, else all at cache_seqlens. Padding counts as tokens. The cache gets rotated keys.
    rotary_interleaved : bool
        Whether rotation pairs elements 2 i and 2 i + 1, or i and i + rotary_dim / 2.
    block_table : int tensor, shape [batch, pages], optional
    softmax_scale, causal, window_size, softcap, alibi_slopes
        See `flash_attn_func`.
    return_softmax_lse : bool
        Whether to return the LSE, too.
    num_splits : int
        1 keeps the keys of a row together, with the same bits in any batch; else the fastest split.
    k_descale, v_descale, s_aux
        See `flash_attn_func`.

    Returns
    -------
    out : tensor, shape [batch, tokens, heads, head_dim]
    softmax_lse : float32 tensor, shape [batch, heads, tokens], with ``return_softmax_lse``

    Raises
    ------
    TypeError, ValueError
        As `flash_attn_func`; also if new tokens come without `cache_seqlens`, lengths exceed the
        cache or lie within the padding, or positions have no angles.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.ones(2, 1, 4, 16), torch.zeros(2, 8, 1, 16)
    >>> new = torch.ones(2, 1, 1, 16)
    >>> flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3).shape
    torch.Size([2, 1, 4, 16])
    """
    name = "flash_attn_with_kvcache"
    check_supported(name, q, k_cache, v_cache, k, v, alibi_slopes)
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
    leftpad = left_padding(name, "cache_leftpad", cache_leftpad, lengths, block_table)
    left, right = window_of(name, window_size)
    kv_lens = lengths
    if k is not None:
        check_axes(name, "batch new_tokens kv_heads dim", k=k, v=v)
        at = _places(k_cache, v_cache, k, v, table, lengths)
        kv_lens = lengths + k.shape[1]
    if rotary_cos is not None or rotary_sin is not None:
        if k is None or k_cache.element_size() == 1:
            raise ValueError(f"{name}: rotary_cos must be given with k and a cache of numbers")
        rotary = Rotary(name, rotary_cos, rotary_sin, rotary_interleaved, q.shape[3])
        at_one_position = not causal and left < 0 and right < 0
        rotary.check(lengths, max(k.shape[1], 1 if at_one_position else q.shape[1]))
        q = rotary.turned(q, lengths, at_one_position=at_one_position)
        k = rotary.turned(k, lengths)
    k_pages, v_pages = k_cache, v_cache
    if cache_leftpad is not None:
        kv_lens = kv_lens - leftpad
        k_pages, v_pages, table = _padded(k_cache, v_cache, rows, leftpad, kv_lens)
    keys = (k_pages, v_pages, kv_lens, table)
    options = (softmax_scale, causal, (left, right), softcap, num_splits == 1)
    of_heads: dict[str, Any] = {
        "k_descale": k_descale, "v_descale": v_descale, "alibi_slopes": alibi_slopes,
        "s_aux": s_aux,
    }  # fmt: skip
    if k is not None:
        # Attention of zero queries refuses invalid arguments before anything is written.
        attend_batch(name, q[:, :0], *keys, *options, **of_heads)
        _write(k_cache, at, k)
        _write(v_cache, at, v)
    out, lse = attend_batch(name, q, *keys, *options, **of_heads)
    return (out, lse) if return_softmax_lse else out
