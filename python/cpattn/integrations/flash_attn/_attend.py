# SPDX-License-Identifier: Apache-2.0
"""Attention over pages for all functions of this package, and checks of their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._arguments import integer, items
from ..._containers import empty, need_scales, torch_of
from ..._types import AnyTensor
from ...attention import default_scale, paged_attention
from .._ragged import dense_rows
from .._visibility import Lengths, visibility

WindowSize = tuple[int, int]


def check_supported(
    function: str, q: AnyTensor, *others: AnyTensor | None, dropout_p: float = 0.0
) -> None:
    torch = torch_of(q)
    if torch is None:
        raise TypeError(f"{function}: q must be a torch tensor, got {type(q).__name__}")
    if dropout_p != 0:
        raise ValueError(f"{function}: dropout_p must be 0, there is no dropout, got {dropout_p}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others) if x is not None):
        raise ValueError(
            f"{function}: inputs must not require gradients, there is no backward pass; call it "
            "under torch.no_grad() or detach() them"
        )


def check_axes(function: str, axes: str, **tensors: Any) -> None:
    """Refuse tensors whose number of axes differs from the words of `axes`."""
    for name, x in tensors.items():
        if getattr(x, "ndim", None) != len(axes.split()):
            shape = list(x.shape) if hasattr(x, "shape") else type(x).__name__
            layout = axes.replace(" ", ", ")
            raise ValueError(f"{function}: {name} must be [{layout}], got shape {shape}")


def window_of(function: str, window_size: Any) -> tuple[int, int]:
    """Return the number of keys before and after a token's own, from two ints or a tensor."""
    sides = items(window_size, function, "window_size")
    if len(sides) != 2:
        raise ValueError(
            f"{function}: window_size must be a pair (left, right), got {len(sides)} values"
        )
    left, right = (integer(side, function, "window_size") for side in sides)
    return left, right


def left_padding(
    function: str, name: str, leftpad: Any, lengths: Lengths, block_table: Any
) -> Lengths:
    """Return the padding tokens before the first key of each sequence; `lengths` include them."""
    if leftpad is None:
        return np.zeros_like(lengths)
    if block_table is not None:
        raise ValueError(f"{function}: {name} must not be given with block_table")
    padding = np.asarray(leftpad)
    if (
        padding.dtype.kind not in "iu"
        or padding.shape != lengths.shape
        or np.any((padding < 0) | (padding > lengths))
    ):
        raise ValueError(
            f"{function}: {name} must be {len(lengths)} integers from 0 to the lengths {lengths}, "
            f"got {padding}"
        )
    return padding.astype(np.int64)


def _is_by_sequence(function: str, name: str, x: Any, batch: int, **heads: int) -> bool:
    """Tell whether a tensor has numbers per sequence and head, not only per head."""
    if getattr(x, "ndim", 0) < 2:
        return False
    ((axis, count),) = heads.items()
    if list(x.shape) != [batch, count]:
        raise ValueError(
            f"{function}: {name} must be [batch, {axis}] = [{batch}, {count}], "
            f"got shape {list(x.shape)}"
        )
    return True


def _scale_of(function: str, name: str, descale: Any, batch: int, kv_heads: int) -> Any:
    """Return [batch, kv_heads] of the package, or scales of paged_attention for all sequences."""
    if not _is_by_sequence(function, name, descale, batch, kv_heads=kv_heads) or batch == 0:
        return descale
    return descale[0].contiguous() if bool((descale == descale[0]).all()) else descale


def attend(
    function: str,
    q: AnyTensor,
    k_pages: AnyTensor,
    v_pages: AnyTensor,
    q_lens: Lengths,
    kv_lens: Lengths,
    block_table: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    batch_invariant: bool = False,
    *,
    k_descale: AnyTensor | None = None,
    v_descale: AnyTensor | None = None,
    alibi_slopes: AnyTensor | None = None,
    s_aux: AnyTensor | None = None,
) -> tuple[AnyTensor, AnyTensor]:
    """Attend over pages; return out [tokens, heads, dim] and LSE [heads, tokens]."""
    need_scales(function, k_pages, k_descale=k_descale, v_descale=v_descale)
    options = (softmax_scale, causal, window_size, softcap, batch_invariant)
    batch, kv_heads = len(q_lens), k_pages.shape[2]
    scales: list[Any] = [
        _scale_of(function, name, descale, batch, kv_heads)
        for name, descale in (("k_descale", k_descale), ("v_descale", v_descale))
    ]
    lse = empty(function, q, (q.shape[1], q.shape[0]), "float32")
    _is_by_sequence(function, "alibi_slopes", alibi_slopes, batch, heads=q.shape[1])
    if any(getattr(scale, "ndim", 0) == 2 for scale in scales):
        out = empty(function, q, (*q.shape[:2], v_pages.shape[-1]))
        end = 0
        for s, q_len in enumerate(q_lens):  # each sequence has its own scales
            rows, end = slice(end, end + q_len), end + q_len
            own = [x[s] if getattr(x, "ndim", 0) == 2 else x for x in (*scales, alibi_slopes)]
            out[rows], lse[:, rows] = attend(
                function, q[rows], k_pages, v_pages, q_lens[s : s + 1], kv_lens[s : s + 1],
                block_table[s : s + 1], *options, k_descale=own[0], v_descale=own[1],
                alibi_slopes=own[2], s_aux=s_aux,
            )  # fmt: skip
        return out, lse
    left, right = window_of(function, window_size)
    out = paged_attention(
        q, k_pages, v_pages, q_lens=q_lens, kv_lens=kv_lens, block_tables=block_table,
        k_scale=scales[0], v_scale=scales[1],
        scale=default_scale(function, q.shape[2]) if softmax_scale is None else softmax_scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=None if s_aux is None else s_aux.float(),
        batch_invariant=batch_invariant, lse=lse.T, **visibility(left, 0 if causal else right),
    )  # fmt: skip
    return out, lse.masked_fill_(lse == -np.inf, np.inf)


def attend_batch(
    function: str,
    q: AnyTensor,
    k_pages: AnyTensor,
    v_pages: AnyTensor,
    kv_lens: Lengths,
    block_table: Any,
    *options: Any,
    **of_heads: Any,
) -> tuple[AnyTensor, AnyTensor]:
    """Attend for queries of equal lengths; return out [batch, tokens, heads, dim] and LSE
    [batch, heads, tokens]."""
    batch, tokens, heads = q.shape[:3]
    q_lens = np.full(batch, tokens)
    rows = dense_rows(q).flatten(0, 1)
    out, lse = attend(
        function, rows, k_pages, v_pages, q_lens, kv_lens, block_table, *options, **of_heads
    )
    lse = lse.view(heads, batch, tokens).transpose(0, 1).contiguous()
    return out.view(batch, tokens, heads, out.shape[-1]), lse
