# SPDX-License-Identifier: Apache-2.0
"""What the functions share: what they refuse, and attention over pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._containers import empty, torch_of
from ..._types import AnyTensor
from ..._visibility import Lengths, visibility
from ...attention import default_scale, paged_attention

WindowSize = tuple[int, int]


def check_supported(
    function: str, q: AnyTensor, *others: AnyTensor, dropout_p: float = 0.0, **unsupported: Any
) -> None:
    torch = torch_of(q)
    if torch is None:
        raise TypeError(f"{function}: q must be a torch tensor, got {type(q).__name__}")
    if dropout_p != 0:
        raise ValueError(f"{function}: dropout_p must be 0, there is no dropout, got {dropout_p}")
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{function}: {name} is not supported, it must be None")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others) if x is not None):
        raise ValueError(
            f"{function}: inputs must not require gradients, there is no backward pass; call it "
            "under torch.no_grad() or detach() them"
        )


def rows_contiguous(x: AnyTensor) -> AnyTensor:
    return x if x.stride(-1) == 1 else x.contiguous()


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
) -> tuple[AnyTensor, AnyTensor]:
    """Attention over pages: out [tokens, heads, dim] and LSE [heads, tokens]."""
    lse = empty(function, q, (q.shape[1], q.shape[0]), "float32")
    left, right = window_size
    out = paged_attention(
        q,
        k_pages,
        v_pages,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_tables=block_table,
        scale=default_scale(function, q.shape[2]) if softmax_scale is None else softmax_scale,
        softcap=softcap,
        batch_invariant=batch_invariant,
        lse=lse.T,
        **visibility(q_lens, kv_lens, left, 0 if causal else right),
    )
    return out, lse.masked_fill_(lse == -np.inf, np.inf)


def attend_batch(
    function: str,
    q: AnyTensor,
    k_pages: AnyTensor,
    v_pages: AnyTensor,
    kv_lens: Lengths,
    block_table: Any,
    *options: Any,
) -> tuple[AnyTensor, AnyTensor]:
    """The same for queries of equal lengths: out [batch, tokens, heads, dim], LSE [batch, heads,
    tokens]."""
    batch, tokens, heads = q.shape[:3]
    q_lens = np.full(batch, tokens)
    rows = rows_contiguous(q).flatten(0, 1)
    out, lse = attend(function, rows, k_pages, v_pages, q_lens, kv_lens, block_table, *options)
    lse = lse.view(heads, batch, tokens).transpose(0, 1).contiguous()
    return out.view(batch, tokens, heads, out.shape[-1]), lse
