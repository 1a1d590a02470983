# SPDX-License-Identifier: Apache-2.0
"""Models and options of replays that are small enough for tests."""

from __future__ import annotations

from dataclasses import replace

from cpattn.replay.dense.model import DenseConfig
from cpattn.replay.dsa.model import DsaConfig
from cpattn.replay.records import ReplayOptions

SMALL = DenseConfig(
    num_layers=2, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96, vocab_size=64
)
SMALL_DSA = DsaConfig(
    num_heads=2, hidden_size=64, intermediate_size=96, vocab_size=64, q_lora_rank=48,
    kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, index_heads=4,
    index_head_dim=32, topk=24,
)  # fmt: skip
FP8_DSA = replace(
    SMALL_DSA, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, dtype="bfloat16",
    kv_dtype="fp8",
)  # fmt: skip
RAGGED_DSA = replace(FP8_DSA, prefill_impl="flashmla_sparse")
OPTIONS = ReplayOptions(
    model=SMALL, cp_size=2, page_size=4, token_budget=300, pool_tokens=1000, scale_lengths=64,
    num_threads=1, check_rows=8, torch_baseline=False, timeout_seconds=60,
)  # fmt: skip
