# SPDX-License-Identifier: Apache-2.0
"""A model of sparse attention small enough for tests."""

from __future__ import annotations

from cpattn.replay.dsa.model import DsaConfig

SMALL_DSA = DsaConfig(
    num_heads=2,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=64,
    q_lora_rank=48,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_heads=4,
    index_head_dim=32,
    topk=24,
)
