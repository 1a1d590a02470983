# SPDX-License-Identifier: Apache-2.0
"""The whole replay runs over several processes, and says why when one of them fails."""

from dataclasses import replace

import numpy as np
import pytest

from cpattn.scheduling.prefix_cache import Lease
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch, Chunk
from cpattn_lab.processes.workers import WorkerError, Workers
from cpattn_lab.replay.dense.check import Checker
from cpattn_lab.replay.driver import replay
from cpattn_lab.replay.messages import Work, WorkerConfig, ranks_of, run
from cpattn_lab.replay.report.summary import check_line, summarize
from cpattn_lab.traffic.trace import generate_trace
from support.replay.replay_models import FP8_DSA, OPTIONS, RAGGED_DSA, SMALL, SMALL_DSA
from support.transfer.transfer_processes import requires_mooncake

pytestmark = pytest.mark.slow


WIDE = replace(SMALL, head_dim=32, vocab_size=256)
INT8, FP8 = (replace(WIDE, kv_dtype=name) for name in ("int8", "fp8"))
HALF, BRAIN = (replace(SMALL, dtype=name) for name in ("float16", "bfloat16"))


@pytest.mark.parametrize(
    ("strategy", "cp_size", "pp_size", "model", "ways"),
    [
        ("zigzag", 2, 2, SMALL, ""),
        ("interleave", 3, 1, BRAIN, ""),
        ("zigzag", 2, 1, FP8, ""),
        ("zigzag", 2, 1, replace(WIDE, kv_dtype="fp8_e5m2", dtype="bfloat16"), ""),
        ("zigzag", 2, 1, INT8, ""),
        ("zigzag", 2, 1, FP8_DSA, ""),
        ("interleave", 3, 1, SMALL_DSA, ""),
        ("contiguous", 2, 1, RAGGED_DSA, ""),
        ("zigzag", 1, 1, SMALL, "page_interleave auto"),
        ("contiguous", 2, 2, BRAIN, "page_interleave pass_q"),
        ("zigzag", 3, 1, SMALL, "page_interleave all_to_all"),
        ("zigzag", 2, 1, HALF, "token_interleave:4 gather"),
        ("contiguous", 3, 1, SMALL, "token_interleave:2 ring"),
        ("zigzag", 3, 1, FP8, "page_interleave gather"),
        ("zigzag", 3, 1, INT8, "token_interleave auto"),
        ("interleave", 3, 1, SMALL_DSA, "token_interleave gather"),
        ("contiguous", 2, 1, SMALL_DSA, "token_interleave:2 pass_q"),
    ],
)
def test_every_batch_is_right(strategy, cp_size, pp_size, model, ways):
    is_sparse, is_plain = model.kind == "dsa", model.kind == "dense" and not model.has_codes
    sizes = {"strategy": strategy, "cp_size": cp_size, "pp_size": pp_size, "torch_baseline": True}
    placement, exchange = ways.split() or ("replicated", "gather")
    sizes |= {"placement": placement} | ({"exchange": exchange} if ways else {})
    options = replace(OPTIONS, **sizes, model=model)
    steps: list[tuple[int, int, str]] = []
    requests = generate_trace(30 if is_plain else 10, seed=1)
    report = replay(requests, options, progress=lambda *step: steps.append(step))
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
        if is_sparse and not ways:  # attention over shared pools includes it
            per_pair = 2 * model.index_heads * model.index_head_dim
            assert batch.flops["indexer"] == pairs * per_pair
        elif not is_sparse:
            flops = 4 * pairs * model.num_heads * model.head_dim * model.num_layers
            assert batch.flops == {"attention": flops}
        assert tuple(batch.phases) == options.phases
        assert all(seconds > 0 for seconds in batch.phases.values())
        assert len(batch.rank_sent_bytes) == cp_size * pp_size
        assert exchange in ("auto", batch.exchange)
        assert batch.exchange == "pass_q" or model is not INT8 or not ways
        assert tuple(batch.torch_seconds) == options.attention_phases
        if is_sparse or is_plain:
            assert batch.torch_difference < (0.1 if is_sparse else report.tolerance)
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert {total for _, total, _ in steps} == {report.input_tokens}
    told = {what for _, _, what in steps}
    assert {f"batch 0: {part}" for part in ("attention", "torch baseline", "check")} <= told
    summary = summarize(report)
    assert summary["placement"] == placement
    assert sum(summary["exchanges"].values()) == len(report.batches)
    assert (summary["sent_bytes"] > 0) == (cp_size > 1)
    assert len(report.peak_bytes) == cp_size * pp_size
    assert min(report.peak_bytes) > 50 * 2**20
    if is_sparse:
        assert 0 < report.checked_keys <= report.checked_rows * model.topk
        assert report.swapped_keys < report.checked_keys / 10
    elif model.has_codes:
        assert 0 < summary["error_over_codes"] <= 1
        plain = Checker.tolerance_of(replace(model, kv_dtype="bf16"))
        assert report.tolerance > plain
        if model.dtype == "float32":  # its roundings are tiny beside those of codes
            assert summary["max_error"] > plain
        assert "allow against the oracle on the same codes" in check_line(report)


# The blocks of a prompt map to its number of tokens at 1/64 of the length.
LENGTHS = {(0,): 1, (1,): 2, (2,): 5, (3, 4): 9}
REQUESTS = [Request(0, 64 * length, 128, ids) for ids, length in LENGTHS.items()]


@pytest.mark.parametrize(
    ("model", "cp_size", "pp_size", "strategy", "budget", "decode_tokens"),
    [
        (SMALL, 2, 1, "zigzag", 1, 0),
        (replace(WIDE, kv_dtype="int8"), 3, 1, "contiguous", 3, 0),
        (SMALL_DSA, 3, 1, "interleave", 3, 0),
        (FP8_DSA, 3, 1, "zigzag", 3, 0),
        (RAGGED_DSA, 3, 1, "contiguous", 1, 0),
        (SMALL, 2, 2, "interleave", 1, 2),
        (SMALL_DSA, 3, 1, "zigzag", 1, 2),
    ],
)
def test_a_rank_may_have_nothing_to_do(model, cp_size, pp_size, strategy, budget, decode_tokens):
    """A rank that has no row of a batch takes part, but computes nothing."""
    if decode_tokens:
        requires_mooncake()
    sizes = {"cp_size": cp_size, "pp_size": pp_size, "strategy": strategy, "model": model}
    options = replace(OPTIONS, **sizes, token_budget=budget, decode_tokens=decode_tokens)
    report = replay(REQUESTS, options)
    assert report.passed
    assert report.new_tokens + report.hit_tokens == report.input_tokens == 17
    assert 0 in [rank for batch in report.batches for rank in batch.rank_rows]


def test_ranks_have_rows_in_proportion_to_their_weights():
    report = replay(REQUESTS, replace(OPTIONS, model=SMALL, weights=(4, 1)))
    assert report.passed
    assert sum(batch.rank_rows[0] for batch in report.batches) >= 17 / 2
    assert "zigzag by 4:1 over 2 ranks" in report.options.title


def test_a_failing_worker_says_why():
    lease = Lease(blocks=(), cached_tokens=0)
    chunk = Chunk(0, Request(0, 3, 1, (0,)), lease, begin=0, end=3)
    pages = np.array([[11]], dtype=np.int32)  # the pool ends at page 10
    batch = Batch(0, (chunk,), [3], [0], pages, slots=np.arange(44, 47))
    config = WorkerConfig(
        model=SMALL, cp_size=2, strategy="zigzag", page_size=4, num_pages=10, num_threads=1,
        torch_baseline=False, timeout_seconds=60,
    )  # fmt: skip
    message = r"^rank \d failed: (ValueError|RuntimeError): .*(slots must be below|refused its arg)"
    with Workers(ranks_of(config)) as workers, pytest.raises(WorkerError, match=message):
        run(workers, Work(batch, token_ids=np.arange(3), rows=np.arange(3)))
