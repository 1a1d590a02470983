# SPDX-License-Identifier: Apache-2.0
"""Sequences of different lengths, one after another or in pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._ragged import RaggedPages, dense_rows
from .._visibility import Lengths
from ._attend import WindowSize, attend, check_axes, check_supported, left_padding


def _ends(function: str, name: str, cu_seqlens: AnyTensor, num_rows: int | None) -> Lengths:
    """Return cumulative lengths as NumPy, checked against the number of rows."""
    ends = np.asarray(cu_seqlens, np.int64)
    if ends.ndim != 1 or len(ends) == 0 or ends[0] != 0 or np.any(np.diff(ends) < 0):
        raise ValueError(f"{function}: {name} must start at 0 and not decrease, got {ends}")
    if num_rows is not None and ends[-1] > num_rows:
        raise ValueError(
            f"{function}: {name} must end within the {num_rows} rows it divides, got {ends[-1]}"
        )
    return ends


def _varlen_forward(
    function: str,
    q: AnyTensor,
    k: AnyTensor,
    v: AnyTensor,
    cu_seqlens_q: AnyTensor,
    cu_seqlens_k: AnyTensor,
    block_table: AnyTensor | None,
    seqused_k: AnyTensor | None,
    leftpad_k: AnyTensor | None,
    *options: Any,
    **of_heads: Any,
) -> tuple[AnyTensor, AnyTensor]:
    check_axes(function, "tokens heads dim", q=q)
    rows = "tokens kv_heads dim" if block_table is None else "num_pages page_size kv_heads dim"
    check_axes(function, rows, k=k, v=v)
    ends_q = _ends(function, "cu_seqlens_q", cu_seqlens_q, len(q))
    num_rows = None if block_table is not None else len(k)
    ends_k = _ends(function, "cu_seqlens_k", cu_seqlens_k, num_rows)
    if len(ends_q) != len(ends_k):
        raise ValueError(
            f"{function}: cu_seqlens_q and cu_seqlens_k must have one length, got {len(ends_q)} "
            f"and {len(ends_k)}"
        )
    kv_lens = np.diff(ends_k)
    if seqused_k is not None:
        used = np.asarray(seqused_k, np.int64)
        if used.shape != kv_lens.shape or np.any(used > kv_lens):
            raise ValueError(
                f"{function}: seqused_k must be at most the lengths {kv_lens}, got {used}"
            )
        kv_lens = used
    leftpad = left_padding(function, "leftpad_k", leftpad_k, kv_lens, block_table)
    kv_lens = kv_lens - leftpad
    table: Any = block_table
    k, v = dense_rows(k), dense_rows(v)
    if table is None:
        pages = RaggedPages(ends_k[:-1] + leftpad, kv_lens, len(k))
        k, v, table = pages.of(k), pages.of(v), pages.block_tables
    q = dense_rows(q)
    return attend(function, q, k, v, np.diff(ends_q), kv_lens, table, *options, **of_heads)


def flash_attn_varlen_func(
    q: AnyTensor,
    k: AnyTensor,
    v: AnyTensor,
    cu_seqlens_q: AnyTensor,
    cu_seqlens_k: AnyTensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: AnyTensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: AnyTensor | None = None,
    *,
    k_descale: AnyTensor | float | None = None,
    v_descale: AnyTensor | float | None = None,
    s_aux: AnyTensor | None = None,
) -> Any:
    """Attention of ragged sequences.

    Parameters
    ----------
    q : tensor, shape [total_q, heads, head_dim]
        Queries, sequence after sequence.
    k, v : tensors, shape [total_k, kv_heads, head_dim]
        With ``block_table``: [num_pages, page_size, kv_heads, head_dim], any page size.
    cu_seqlens_q, cu_seqlens_k : int tensors, shape [batch + 1]
        Begin and end of each sequence, which may be empty.
    max_seqlen_q, max_seqlen_k
        Not needed.
    block_table : int tensor, shape [batch, pages], optional
    softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
        See `flash_attn_func`.
    k_descale, v_descale, s_aux
        See `flash_attn_func`.
    dropout_p, deterministic
        Only the defaults; see `flash_attn_func`.

    Returns
    -------
    out : tensor, shape [total_q, heads, head_dim]
    softmax_lse : float32 tensor, shape [heads, total_q], with ``return_attn_probs``

    Raises
    ------
    TypeError, ValueError
        As `flash_attn_func`; also if offsets decrease or exceed q, k or the pages.

    Examples
    --------
    >>> import torch
    >>> q, ends = torch.ones(5, 4, 16), torch.tensor([0, 2, 5])
    >>> flash_attn_varlen_func(q, q, q, ends, ends, 3, 3, causal=True).shape
    torch.Size([5, 4, 16])
    """
    name = "flash_attn_varlen_func"
    check_supported(name, q, k, v, alibi_slopes, dropout_p=dropout_p)
    out, lse = _varlen_forward(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, None, None,
        softmax_scale, causal, window_size, softcap,
        k_descale=k_descale, v_descale=v_descale, alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _flash_attn_varlen_forward(
    q: AnyTensor,
    k: AnyTensor,
    v: AnyTensor,
    cu_seqlens_q: AnyTensor,
    cu_seqlens_k: AnyTensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: AnyTensor | None = None,
    return_softmax: bool = False,
    block_table: AnyTensor | None = None,
    leftpad_k: AnyTensor | None = None,
    seqused_k: AnyTensor | None = None,
    zero_tensors: bool = False,
) -> tuple[AnyTensor, AnyTensor, AnyTensor, None]:
    """Call `flash_attn_varlen_func` as libraries do; see `_flash_attn_forward`.

    ``seqused_k`` [batch] is the number of keys of each sequence, after ``leftpad_k`` [batch] rows
    that are no keys. ``zero_tensors`` has no effect.
    """
    name = "_flash_attn_varlen_forward"
    check_supported(name, q, k, v, alibi_slopes, dropout_p=dropout_p)
    out, lse = _varlen_forward(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad_k,
        softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return out, lse, q.new_empty(0), None
