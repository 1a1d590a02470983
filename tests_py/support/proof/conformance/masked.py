# SPDX-License-Identifier: Apache-2.0
"""Attention with any mask, and in two parts, by `cpattn.paged_attention` and its custom mask."""

from __future__ import annotations

import numpy as np
import torch

import cpattn


def attend_where(sees, q, k, v, *, q_lens, kv_lens, **options):
    """Query i of a sequence sees key j where ``sees(i, j, q_len, kv_len)``."""
    parts = [
        [sees(i, j, q_len, kv_len) for i in range(q_len) for j in range(kv_len)]
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]
    mask = torch.tensor([flag for part in parts for flag in part], dtype=torch.bool)
    options.pop("allow_short_kv", None)
    return cpattn.paged_attention(
        q, k, v, q_lens=q_lens, kv_lens=kv_lens, causal=False, custom_mask=mask, **options
    )


def usual_mask(causal, window, *, top_left=False, shift=0):
    """What a query sees; keys up to `shift` behind its own, from its row on if `top_left`."""

    def sees(i, j, q_len, kv_len):
        position = i if top_left and causal else i + kv_len - q_len
        return (not causal or j <= position + shift) and (window is None or j >= position - window)

    return sees


def in_parts(q, k, v, *, causal, window=None, **options):
    """Over the first half of each sequence's keys, and over the second."""
    usual = usual_mask(causal, window)

    def part(second):
        def sees(i, j, q_len, kv_len):
            return (j >= kv_len // 2) == second and usual(i, j, q_len, kv_len)

        return attend_where(sees, q, k, v, **options)

    return part(False), part(True)


def tokens_of(memory, pages, kv_len, kv_layout="NHD"):
    """Keys or values of one sequence, [kv_len, heads, dim]."""
    pages = memory[pages.long()]
    if kv_layout == "HND":
        pages = pages.transpose(1, 2)
    return pages.flatten(0, 1)[:kv_len]


def plain_weights(
    s, q, k, v, *, kv_lens, block_tables, scale, causal, kv_layout="NHD", window=None, softcap=0.0,
    sinks=None, **_,
):  # fmt: skip
    """The weights of a sequence's keys in float32, [rows, heads, keys], and its values by head."""
    kv_len, group = kv_lens[s], q.shape[1] // k.shape[2 if kv_layout == "NHD" else 1]
    own_k, own_v = (tokens_of(x, block_tables[s], kv_len, kv_layout) for x in (k, v))
    own_k, own_v = (x.float().repeat_interleave(group, 1) for x in (own_k, own_v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), own_k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.as_tensor(np.arange(len(q)) + kv_len - len(q))[:, None]
    key = torch.arange(kv_len)[None]
    hidden = (key > position) & causal
    if window is not None:
        hidden |= key < position - window
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(len(q), -1)[..., None]], -1)
    return torch.softmax(scores, -1).nan_to_num()[..., :kv_len], own_v
