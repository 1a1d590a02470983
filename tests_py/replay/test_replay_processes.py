# SPDX-License-Identifier: Apache-2.0
"""The whole replay over several processes, and what it says when one fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from cpattn.scheduling.prefix_cache import Lease
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch, Chunk
from cpattn_lab.processes.workers import WorkerError, Workers
from cpattn_lab.replay.driver import replay
from cpattn_lab.replay.messages import Work, WorkerConfig, ranks_of, run
from cpattn_lab.traffic.trace import generate_trace
from support.replay.replay_models import FP8_DSA, OPTIONS, RAGGED_DSA, SMALL, SMALL_DSA
from support.transfer.transfer_processes import requires_mooncake

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "cp_size", "pp_size", "dtype"),
    [
        ("zigzag", 2, 2, "float32"),
        ("interleave", 3, 1, "bfloat16"),
        ("contiguous", 2, 1, "float16"),
    ],
)
def test_every_batch_is_right(strategy, cp_size, pp_size, dtype):
    sizes = {"strategy": strategy, "cp_size": cp_size, "pp_size": pp_size, "torch_baseline": True}
    options = replace(OPTIONS, **sizes, model=replace(SMALL, dtype=dtype))
    steps: list[tuple[int, int, str]] = []
    report = replay(generate_trace(30, seed=1), options, progress=lambda *step: steps.append(step))
    assert report.passed
    assert all(batch.max_error is not None for batch in report.batches)
    assert 0 < max(batch.max_error or 0.0 for batch in report.batches) <= report.tolerance
    assert report.evictions > 0
    assert sum(batch.num_chunks for batch in report.batches) > 0
    assert report.new_tokens + report.hit_tokens == report.input_tokens
    assert report.hit_tokens <= report.unbounded_hit_tokens
    for batch in report.batches:
        assert sum(batch.rank_rows) == batch.new_tokens * pp_size
        pairs = sum(batch.rank_pairs) // pp_size
        assert batch.flops == {"attention": 4 * pairs * SMALL.num_heads * SMALL.head_dim * 2}
        phases = {"metadata", "gather", "attention", "rest", *["stage"] * (pp_size > 1)}
        assert set(batch.phases) == phases
        assert all(seconds > 0 for seconds in batch.phases.values())
        assert batch.torch_seconds["attention"] > 0
        assert batch.torch_difference < report.tolerance
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert {total for _, total, _ in steps} == {report.input_tokens}
    told = {what for _, _, what in steps}
    assert {f"batch 0: {part}" for part in ("attention", "torch baseline", "check")} <= told
    assert len({done for done, _, what in steps if what.startswith("batch 0")}) > 4
    assert len(report.peak_bytes) == cp_size * pp_size
    assert min(report.peak_bytes) > 50 * 2**20


# Tokens at 1/64 of the length, by the blocks of the prompt.
LENGTHS = {(0,): 1, (1,): 2, (2,): 5, (3, 4): 9}
REQUESTS = [Request(0, 64 * length, 128, ids) for ids, length in LENGTHS.items()]


@pytest.mark.parametrize(
    ("model", "cp_size", "pp_size", "strategy", "budget", "decode_tokens"),
    [
        (SMALL, 2, 1, "zigzag", 1, 0),
        (SMALL, 3, 1, "contiguous", 3, 0),
        (SMALL_DSA, 3, 1, "interleave", 3, 0),
        (FP8_DSA, 3, 1, "zigzag", 3, 0),
        (RAGGED_DSA, 3, 1, "contiguous", 1, 0),
        (SMALL, 2, 2, "interleave", 1, 2),
        (SMALL_DSA, 3, 1, "zigzag", 1, 2),
    ],
)
def test_a_rank_may_have_nothing_to_do(model, cp_size, pp_size, strategy, budget, decode_tokens):
    """A rank without a row of a batch takes part, and computes nothing."""
    if decode_tokens:
        requires_mooncake()
    sizes = {"cp_size": cp_size, "pp_size": pp_size, "strategy": strategy, "model": model}
    options = replace(OPTIONS, **sizes, token_budget=budget, decode_tokens=decode_tokens)
    report = replay(REQUESTS, options)
    assert report.passed
    assert report.new_tokens + report.hit_tokens == report.input_tokens == 17
    assert 0 in [rank for batch in report.batches for rank in batch.rank_rows]


def test_a_failing_worker_says_why():
    lease = Lease(blocks=(), cached_tokens=0)
    chunk = Chunk(0, Request(0, 3, 1, (0,)), lease, begin=0, end=3)
    pages = np.array([[11]], dtype=np.int32)  # one more than there are
    batch = Batch(0, (chunk,), [3], [0], pages, slots=np.arange(44, 47))
    config = WorkerConfig(
        model=SMALL, cp_size=2, strategy="zigzag", page_size=4, num_pages=10, num_threads=1,
        torch_baseline=False, timeout_seconds=60,
    )  # fmt: skip
    message = r"^rank \d failed: (ValueError|RuntimeError): .*(slots must be below|refused its arg)"
    with Workers(ranks_of(config)) as workers, pytest.raises(WorkerError, match=message):
        run(workers, Work(batch, token_ids=np.arange(3), rows=np.arange(3)))
