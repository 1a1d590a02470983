# SPDX-License-Identifier: Apache-2.0
"""The whole replay over several processes, and what it says when one fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from cpattn._workers import WorkerError, Workers
from cpattn.replay.dense.model import DenseConfig
from cpattn.replay.driver import replay
from cpattn.replay.messages import Work, WorkerConfig, ranks_of, run
from cpattn.replay.records import ReplayOptions
from cpattn.traffic.prefix_cache import Lease
from cpattn.traffic.scheduler import Batch, Chunk
from cpattn.traffic.trace import Request, generate_trace

pytestmark = pytest.mark.slow


SMALL = DenseConfig(
    num_layers=2, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96, vocab_size=64
)
OPTIONS = ReplayOptions(
    model=SMALL,
    page_size=4,
    token_budget=300,
    pool_tokens=1000,
    scale_lengths=64,
    num_threads=1,
    check_rows=8,
    timeout_seconds=60,
)
CASES = [
    pytest.param("zigzag", 2, 1, "float32"),
    pytest.param("interleave", 3, 1, "bfloat16"),
    pytest.param("contiguous", 2, 1, "float16"),
    pytest.param("zigzag", 4, 1, "bfloat16"),
    pytest.param("zigzag", 1, 1, "float32"),
    pytest.param("zigzag", 2, 2, "float32"),
]


@pytest.mark.parametrize(("strategy", "cp_size", "pp_size", "dtype"), CASES)
def test_every_batch_is_right(strategy: str, cp_size: int, pp_size: int, dtype: str) -> None:
    options = replace(
        OPTIONS,
        strategy=strategy,
        cp_size=cp_size,
        pp_size=pp_size,
        model=replace(SMALL, dtype=dtype),
    )
    steps: list[tuple[int, int, str]] = []
    report = replay(generate_trace(30, seed=1), options, progress=lambda *step: steps.append(step))
    assert report.passed
    assert report.tolerance is not None
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
        assert set(batch.phases) == {"metadata", "gather", "attention", "rest"} | (
            {"stage"} if pp_size > 1 else set()
        )
        assert all(seconds > 0 for seconds in batch.phases.values())
        assert batch.torch_seconds is not None
        assert batch.torch_seconds["attention"] > 0
        assert batch.torch_difference is not None
        assert batch.torch_difference < report.tolerance
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert {total for _, total, _ in steps} == {report.input_tokens}
    told = {what for _, _, what in steps}
    assert {f"batch 0: {part}" for part in ("attention", "torch baseline", "check")} <= told
    assert len({done for done, _, what in steps if what.startswith("batch 0")}) > 4
    assert len(report.peak_bytes) == cp_size * pp_size
    assert min(report.peak_bytes) > 50 * 2**20


def config_of(options: ReplayOptions) -> WorkerConfig:
    return WorkerConfig(
        model=options.model,
        cp_size=2,
        strategy="zigzag",
        page_size=options.page_size,
        num_pages=10,
        num_threads=1,
        torch_baseline=False,
        timeout_seconds=60,
    )


def test_a_failing_worker_says_why() -> None:
    lease = Lease(blocks=(), cached_tokens=0)
    chunk = Chunk(0, Request(0, 3, 1, (0,)), lease, begin=0, end=3)
    pages = np.array([[11]], dtype=np.int32)  # one more than there are
    batch = Batch(0, (chunk,), [3], [0], pages, slots=np.arange(44, 47))
    message = r"^rank \d failed: (ValueError|RuntimeError): .*(slots must be below|refused its arg)"
    with (
        Workers(ranks_of(config_of(OPTIONS))) as workers,
        pytest.raises(WorkerError, match=message),
    ):
        run(workers, Work(batch, token_ids=np.arange(3), rows=np.arange(3)))
