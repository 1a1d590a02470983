# SPDX-License-Identifier: Apache-2.0
"""Models and options of replays that are small enough for tests, and invented reports."""

from dataclasses import replace

from cpattn_lab.replay.dense.model import DenseConfig
from cpattn_lab.replay.dsa.model import DsaConfig
from cpattn_lab.replay.records import BatchRecord, ReplayOptions, ReplayReport

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

ENVIRONMENT = {"cpattn": "1", "isa": "portable", "torch": "2", "cpu": "A <CPU>", "cores": 2}
ENVIRONMENT |= {"threads_per_rank": 1}
BATCH = BatchRecord(
    index=0,
    num_sequences=2,
    num_chunks=1,
    new_tokens=100,
    prefix_tokens=60,
    seconds=0.5,
    phases={"metadata": 0.01, "gather": 0.09, "attention": 0.2, "rest": 0.2},
    flops={"attention": 10**9},
    rank_rows=[50, 50],
    rank_pairs=[3000, 1000],
    rank_attention_seconds=[0.25, 0.15],
    torch_seconds={"attention": 0.6},
    torch_difference=1e-3,
    max_error=0.01,
)


def make_report(num_batches: int = 3, **changes: object) -> ReplayReport:
    report = ReplayReport(
        options=ReplayOptions(),
        environment=ENVIRONMENT,
        num_requests=7,
        input_tokens=500 * num_batches,
        unbounded_hit_tokens=450 * num_batches,
        tolerance=0.02,
        batches=[replace(BATCH, index=i) for i in range(num_batches)],
        hit_tokens=400 * num_batches,
        checked_rows=30,
        peak_bytes=[2**28, 2**29],
    )
    return replace(report, **changes)


def make_sparse_report() -> ReplayReport:
    seconds = {"indexer": 0.1, "top-k": 0.02, "attention": 0.08}
    batch = replace(
        BATCH,
        phases={"metadata": 0.01, "gather": 0.09, **seconds, "projections": 0.2},
        flops={"indexer": 4 * 10**9, "attention": 8 * 10**9},
        torch_seconds={phase: 4 * value for phase, value in seconds.items()},
    )
    return make_report(
        options=ReplayOptions(model=DsaConfig(kv_dtype="fp8", dtype="bfloat16")),
        batches=[replace(batch, index=i) for i in range(3)],
        checked_keys=15360,
        swapped_keys=12,
    )
