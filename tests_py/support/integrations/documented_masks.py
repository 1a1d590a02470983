# SPDX-License-Identifier: Apache-2.0
"""Masks, pair by pair, by the documents of the libraries that the package stands in for; nothing is
shared with the package, whose masks they judge."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from support.cases import assert_attention, one_after_another


def flash_attn(
    i: int, j: int, seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]
) -> bool:
    """Follow the docs of flash_attn_func: "the causal mask is aligned to the bottom right corner";
    "Query at position i will only attend to keys between [i + seqlen_k - seqlen_q - window_size[0],
    i + seqlen_k - seqlen_q + window_size[1]] inclusive"; -1 is no bound."""
    left, right = window_size
    if causal and j > i + seqlen_k - seqlen_q:
        return False
    if left != -1 and j < i + seqlen_k - seqlen_q - left:
        return False
    return right == -1 or j <= i + seqlen_k - seqlen_q + right


def flashinfer(
    qo_idx: int, kv_idx: int, qo_len: int, kv_len: int, causal: bool, window_left: int
) -> bool:
    """Follow FlashInfer's kernels: causal hides kv_idx + qo_len > kv_len + qo_idx, a window keeps
    kv_idx + qo_len + window_left >= kv_len + qo_idx; -1 is as long as the sequence."""
    if causal and kv_idx + qo_len > kv_len + qo_idx:
        return False
    return window_left == -1 or kv_idx + qo_len + window_left >= kv_len + qo_idx


def vllm(
    token: int, key: int, query_len: int, seq_len: int, causal: bool, sliding_window: int | None
) -> bool:
    """Follow vLLM, which passes flash-attn the window (sliding_window - 1, 0), so that a token
    itself counts, and (sliding_window - 1, sliding_window - 1) if attention is not causal."""
    window_size = (-1, -1)
    if sliding_window is not None:
        window_size = (sliding_window - 1, 0 if causal else sliding_window - 1)
    return flash_attn(token, key, query_len, seq_len, causal, window_size)


def mask_of(
    sees: Callable[..., bool], q_lens: Sequence[int], kv_lens: Sequence[int], *options: object
) -> np.ndarray:
    """Return `custom_mask`: a bool for each query and key of each sequence."""
    return np.array(
        [
            sees(i, j, q_len, kv_len, *options)
            for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
            for i in range(q_len)
            for j in range(kv_len)
        ],
        bool,
    )


def in_flash_attn(
    q: Any,
    k: Any,
    v: Any,
    q_lens: Any,
    kv_lens: Any,
    causal: bool = False,
    window_size: Any = (-1, -1),
    **options: Any,
) -> dict[str, Any]:
    """Return arguments of the oracle for rows q and keys k of sequences one after the other."""
    mask = mask_of(flash_attn, q_lens, kv_lens, causal, window_size)
    return one_after_another(q, k, v, q_lens, kv_lens, custom_mask=mask, causal=False, **options)


def assert_flash_attn(out: torch.Tensor, lse: torch.Tensor, inputs: dict[str, Any]) -> None:
    """Compare out and LSE [heads, tokens], which is +inf for rows without keys in flash-attn."""
    assert lse.dtype == torch.float32
    assert not torch.isneginf(lse).any()
    assert_attention(out, torch.where(torch.isposinf(lse), -torch.inf, lse).T, inputs)
