# SPDX-License-Identifier: Apache-2.0
"""Sequences of equal lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._ragged import dense_rows
from ._attend import WindowSize, attend_batch, check_axes, check_supported


def _forward(
    function: str,
    q: AnyTensor,
    k: AnyTensor,
    v: AnyTensor,
    *options: Any,
    **of_heads: Any,
) -> tuple[AnyTensor, AnyTensor]:
    check_axes(function, "batch tokens heads dim", q=q, k=k, v=v)
    if not len(q) == len(k) == len(v):
        raise ValueError(
            f"{function}: q, k and v must be of one batch, got {len(q)}, {len(k)} and {len(v)}"
        )
    batch, kv_len = k.shape[:2]
    k, v = dense_rows(k), dense_rows(v)
    if kv_len == 0:  # a page cannot be empty; no page is read
        k, v = (x.new_empty((0, 1, *x.shape[2:])) for x in (k, v))
    table = np.arange(batch)[:, None]
    lengths = np.full(batch, kv_len)
    return attend_batch(function, q, k, v, lengths, table, *options, **of_heads)


def flash_attn_func(
    q: AnyTensor,
    k: AnyTensor,
    v: AnyTensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: AnyTensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    k_descale: AnyTensor | float | None = None,
    v_descale: AnyTensor | float | None = None,
    s_aux: AnyTensor | None = None,
) -> Any:
    """Attention of sequences of equal lengths.

    Parameters
    ----------
    q : float32, float16 or bfloat16 tensor, shape [batch, tokens, heads, head_dim]
    k, v : tensors, shape [batch, kv_tokens, kv_heads, head_dim]
        Keys and values, used in place as one page each; of the dtype of q, or codes.
    softmax_scale : float, default 1/sqrt(head_dim)
    causal : bool
        Whether query i sees only keys up to i + kv_tokens - tokens (bottom right alignment).
    window_size : pair of int, or a tensor of two
        Number of visible keys before and after that key; -1 for no bound.
    softcap : float
        Above 0, scores become softcap * tanh(score / softcap).
    alibi_slopes : float32 tensor, shape [heads] or [batch, heads], optional
        Adds -alibi_slopes * |i + kv_tokens - tokens - j| to the score of query i and key j.
    dropout_p
        Must be 0.
    deterministic
        No effect; it concerns the backward pass.
    return_attn_probs : bool
        Whether to return the LSE, and an empty tensor in place of the probabilities, too.
    k_descale, v_descale : float or tensor, optional
        Factors of keys and values, usually of codes (float8_e4m3fn, float8_e5m2, int8): [batch,
        kv_heads], as in flash-attn 3, [kv_heads] or one number.
    s_aux : tensor of floats, shape [heads], optional
        Logits of attention sinks, under the name of flash-attn 3 for vLLM: each adds exp(s_aux) to
        the denominators of its head. The LSE does not include them.

    Returns
    -------
    out : tensor, shape [batch, tokens, heads, head_dim]
    softmax_lse : float32 tensor, shape [batch, heads, tokens], with ``return_attn_probs``

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit, or dropout is requested.

    Examples
    --------
    >>> import torch
    >>> q, k = torch.ones(1, 2, 4, 16), torch.ones(1, 5, 1, 16)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([1, 2, 4, 16])
    """
    name = "flash_attn_func"
    check_supported(name, q, k, v, alibi_slopes, dropout_p=dropout_p)
    out, lse = _forward(
        name, q, k, v, softmax_scale, causal, window_size, softcap,
        k_descale=k_descale, v_descale=v_descale, alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _flash_attn_forward(
    q: AnyTensor,
    k: AnyTensor,
    v: AnyTensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: AnyTensor | None,
    return_softmax: bool,
) -> tuple[AnyTensor, AnyTensor, AnyTensor, None]:
    """Call `flash_attn_func` as libraries do: out, LSE, no probabilities, no generator state.

    ``return_softmax`` asks for probabilities after dropout, which is not supported.
    """
    name = "_flash_attn_forward"
    check_supported(name, q, k, v, alibi_slopes, dropout_p=dropout_p)
    window = (window_size_left, window_size_right)
    out, lse = _forward(
        name, q, k, v, softmax_scale, causal, window, softcap, alibi_slopes=alibi_slopes
    )
    return out, lse, q.new_empty(0), None
