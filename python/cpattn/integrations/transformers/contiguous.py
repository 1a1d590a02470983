# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values of a whole batch, as `DynamicCache` and other caches give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..._types import AnyTensor
from ...attention import default_scale, paged_attention
from .._ragged import dense_rows
from .._torch_library import Operators
from .._visibility import Lengths
from .masks import FUNCTION, check_bias, lowest, visibility

#: Options that change scores or visible keys and that this module does not read: of T5 (only
#: `contiguous_attention` does), of callers, of Inkling 2 (one per query) and of MiniMax-M3 (which
#: then makes no mask for its blocks).
UNSUPPORTED = ("position_bias", "output_attentions", "sinks", "block_indices")


def check_supported(
    *tensors: AnyTensor | None,
    options: dict[str, Any],
    unsupported: tuple[str, ...] = UNSUPPORTED,
    dropout: float = 0.0,
) -> None:
    """Raise ValueError for options of models that the kernels do not have."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{FUNCTION}: inputs must not require gradients, there is no backward pass; run the "
            "model under torch.inference_mode() or torch.no_grad(), train with sdpa"
        )
    if dropout != 0:
        raise ValueError(f"{FUNCTION}: dropout must be 0, call model.eval(); got {dropout}")
    for name in unsupported:
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"{FUNCTION}: {name} is not supported, use another attn_implementation for it"
            )


def float_sinks(s_aux: AnyTensor | None) -> AnyTensor | None:
    """Return sinks, which are model parameters, in the form that the kernels take."""
    return None if s_aux is None else s_aux.detach().float().contiguous()


def _tokens_apart(x: AnyTensor) -> int | None:
    """Return the distance of two sequences in tokens, or None if it is no whole number."""
    sequence, token = x.stride(0), x.stride(2)
    if token == 0 or sequence % token or sequence < token * x.shape[2]:
        return None
    return int(sequence // token)


def _pages(
    key: AnyTensor, value: AnyTensor, starts: Lengths, kv_lens: Lengths
) -> tuple[AnyTensor, AnyTensor, Any]:
    """Return keys and values [batch, heads, tokens, dim] as pages ("HND"), in place, and a table.

    A sequence is one page. If some sequences start after padding, a page starts at every token and
    overlaps later pages. Its length is the room of the last sequence, so longer sequences have
    several pages, and every page ends within the tensor.
    """
    batch, heads, tokens, _ = key.shape
    if batch == 1:
        begin = int(starts[0])
        return key[:, :, begin:], value[:, :, begin:], np.zeros((1, 1), np.int64)
    if not starts.any():
        return key, value, np.arange(batch)[:, None]
    step = _tokens_apart(key)
    if step is None or step != _tokens_apart(value):
        key, value, step = key.contiguous(), value.contiguous(), heads * tokens
    page_size = tokens - int(starts[-1])
    first = step * np.arange(batch) + starts
    num_pages = 1 + int((first + np.maximum(kv_lens - 1, 0) // page_size * page_size).max())
    k_pages, v_pages = (
        x.as_strided(
            (num_pages, heads, page_size, x.shape[3]),
            (x.stride(2), x.stride(1), x.stride(2), x.stride(3)),
        )
        for x in (key, value)
    )
    most = -(-int(kv_lens.max()) // page_size)
    return k_pages, v_pages, first[:, None] + page_size * np.arange(most)


def contiguous_attention(
    module: Any,
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    attention_mask: AnyTensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: AnyTensor | None = None,
    is_causal: bool | None = None,
    position_bias: AnyTensor | None = None,
    **options: Any,
) -> tuple[AnyTensor, None]:
    """Attention function of transformers on `paged_attention`.

    The call uses keys and values in place. It copies them if the last dimension is not contiguous
    or, with padding, if the distance between sequences is no whole number of tokens.

    Parameters
    ----------
    query : float32, float16 or bfloat16 tensor, shape [batch, num_heads, queries, head_dim]
    key, value : tensors of the dtype of `query`, shape [batch, num_kv_heads, keys, dim]
        Keys and values without repetition for grouped heads; `value` may have another dim.
    attention_mask : tensor, shape [1 or batch, 1 or num_heads, 1 or queries, keys], optional
        Mask with True, or 0 if it has floats, for a visible key; it overrides `sliding_window` and
        `is_causal`. None: query i sees the last `sliding_window` keys up to i + keys - queries, or
        all keys if not `is_causal`. A bool mask is the same for all heads. A float mask with other
        numbers than 0 and the lowest, or other ones per head, adds to scores; the lowest hides.
    scaling : float, default 1/sqrt(head_dim)
    softcap : float, optional
        Scores become softcap * tanh(score / softcap).
    s_aux : tensor, shape [num_heads], optional
        Sinks, as in gpt-oss.
    is_causal : bool, default that of `module`, else True
    position_bias : float tensor of the shapes of `attention_mask`, optional
        Bias of T5, added to scores besides the mask.
    dropout : float
        Must be 0.
    **options
        Options of `UNSUPPORTED` must be None or False; the call ignores all other options.

    Returns
    -------
    out : tensor, shape [batch, queries, num_heads, v_head_dim]
    None
        In place of attention weights.
    """
    check_supported(
        query, key, value, attention_mask, position_bias, dropout=dropout, options=options
    )
    batch, _heads, _queries, head_dim = query.shape
    if key.shape[0] != batch:  # len() would make it a constant of an exported graph
        raise ValueError(
            f"{FUNCTION}: key must have the batch of query, {batch}, got {key.shape[0]}"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window - 1 if causal and sliding_window else None
    scale = default_scale(FUNCTION, head_dim) if scaling is None else scaling
    bands, attend = None, _attend
    if torch.compiler.is_compiling():
        bands = getattr(attention_mask, "cpattn_bands", None)
        attend = torch.ops.cpattn_transformers.attend
    attended: AnyTensor = attend(
        query, key, value, attention_mask, bands, position_bias, float_sinks(s_aux), scale, causal,
        window, float(softcap or 0.0),
    )  # fmt: skip
    return attended, None


def _attend(
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    mask: AnyTensor | None,
    bands: AnyTensor | None,
    position_bias: AnyTensor | None,
    sinks: AnyTensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> AnyTensor:
    batch, heads, queries, _ = query.shape
    shape = batch, heads, queries, key.shape[2]
    band, custom_mask, mask_bias = visibility(mask, bands, shape, causal=causal, window=window)
    bias = mask_bias
    if position_bias is not None:
        check_bias("position_bias", position_bias, shape)
        bias = position_bias if mask_bias is None else mask_bias + position_bias
    k_pages, v_pages, table = _pages(dense_rows(key), dense_rows(value), band.starts, band.kv_lens)
    out: Any = paged_attention(
        dense_rows(query).transpose(1, 2).flatten(0, 1),
        k_pages,
        v_pages,
        q_lens=[queries] * batch,
        kv_lens=band.kv_lens,
        block_tables=table,
        kv_layout="HND",
        scale=scale,
        causal=band.causal,
        allow_short_kv=True,  # queries of left padding see no key
        window=band.window,
        softcap=softcap,
        bias=None if bias is None else _bias_from(bias.detach().expand(shape), band.starts),
        sinks=sinks,
        custom_mask=custom_mask,
    )
    attended: AnyTensor = out.unflatten(0, (batch, queries))
    if mask_bias is not None:
        # The lowest number hides a key only beside visible keys, not if a query has no others.
        blind = mask_bias.amax(-1) <= lowest(mask_bias.dtype)
        attended.masked_fill_(blind.transpose(1, 2).unsqueeze(-1), 0)
    return attended


def _bias_from(bias: AnyTensor, starts: Lengths) -> AnyTensor | list[AnyTensor]:
    """Return a bias [batch, heads, queries, keys], in place, for keys that begin at `starts`."""
    if not starts.any():
        return bias
    return [x[..., start:] for x, start in zip(bias, starts.tolist(), strict=True)]


def _attend_fake(query: AnyTensor, key: AnyTensor, value: AnyTensor, *_: Any) -> AnyTensor:
    batch, heads, queries, _head_dim = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3]))


_operators = Operators("cpattn_transformers")
_operators.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bands, "
    "Tensor? position_bias, Tensor? sinks, float scale, bool causal, SymInt? window, "
    "float softcap) -> Tensor",
    _attend,
    _attend_fake,
)
