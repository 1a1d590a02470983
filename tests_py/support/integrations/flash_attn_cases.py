# SPDX-License-Identifier: Apache-2.0
"""Batches for the functions of flash-attn, and the comparison with the oracle."""

from __future__ import annotations

import numpy as np
import torch

from cpattn.integrations import flash_attn
from support.cases import assert_attention
from support.integrations import documented_masks

HEADS, KV_HEADS, DIM = 4, 2, 32


def normal(*shape, dtype="float32"):
    return torch.randn(shape).to(getattr(torch, dtype))


def oracle_inputs(q, k, v, q_lens, kv_lens, causal=False, window_size=(-1, -1), **options):
    """Arguments of the oracle for rows q and keys k of sequences one after the other."""
    starts = np.cumsum([0, *kv_lens])[:-1]
    mask = documented_masks.mask_of(
        documented_masks.flash_attn, q_lens, kv_lens, causal, window_size
    )
    tables = starts[:, None] + np.arange(max(kv_lens))
    lens = {"q_lens": q_lens, "kv_lens": kv_lens, "block_tables": tables, "page_size": 1}
    tensors = {"q": q, "k_cache": k, "v_cache": v, "custom_mask": mask, "causal": False}
    return {**tensors, **lens, **options}


def assert_result(out, lse, inputs):
    """LSE [heads, tokens] with the sign of flash-attn for rows without keys."""
    assert lse.dtype == torch.float32
    assert not torch.isneginf(lse).any()
    assert_attention(out, torch.where(torch.isposinf(lse), -torch.inf, lse).T, inputs)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run_varlen(q, k, v, q_lens, kv_lens, **options):
    lens = cumulative(q_lens), cumulative(kv_lens), max(q_lens), max(kv_lens)
    options["return_attn_probs"] = True
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *lens, **options)
    return out, lse
