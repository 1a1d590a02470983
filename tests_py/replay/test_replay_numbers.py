# SPDX-License-Identifier: Apache-2.0
"""Numbers that would do nothing, or something else, are refused where they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

from cpattn.cost_model.calibration import calibrate
from cpattn.cost_model.work import AttentionLayer
from cpattn.replay.dense.check import Checker
from cpattn.replay.dense.model import DenseConfig
from cpattn.replay.records import ReplayOptions
from cpattn.traffic.prefix_cache import PrefixCache
from cpattn.traffic.scheduler import prefill_batches
from cpattn.traffic.trace import generate_trace, read_trace, scale_lengths

CACHE = PrefixCache(8, page_size=4, block_tokens=8)


def batches(**options: Any) -> Any:
    return next(prefill_batches(generate_trace(1), CACHE, **options))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ReplayOptions(cp_size=2.5), TypeError, "cp_size must be an integer, got 2.5"),
        (lambda: ReplayOptions(num_threads=True), TypeError, "num_threads must be an integer"),
        (lambda: ReplayOptions(num_threads=-1), ValueError, "num_threads must be >= 0, got -1"),
        (lambda: ReplayOptions(scale_lengths=0), ValueError, "scale_lengths must be >= 1, got 0"),
        (
            lambda: ReplayOptions(timeout_seconds=math.nan),
            ValueError,
            "timeout_seconds must be positive and finite, got nan",
        ),
        (lambda: ReplayOptions(timeout_seconds="9"), TypeError, "timeout_seconds must be a number"),
        (lambda: DenseConfig(num_layers=2.0), TypeError, "num_layers must be an integer, got 2.0"),
        (lambda: DenseConfig(seed=-1), ValueError, "seed must be >= 0, got -1"),
        (lambda: DenseConfig(head_dim=592), ValueError, "head_dim must be at most 576, got 592"),
        (
            lambda: DenseConfig(query_gain=math.inf),
            ValueError,
            "DenseConfig: query_gain must be positive and finite, got inf",
        ),
        (lambda: DenseConfig(rope_theta=0.0), ValueError, "rope_theta must be positive and finite"),
        (lambda: read_trace("x", limit=-1), ValueError, "read_trace: limit must be >= 1, got -1"),
        (lambda: read_trace("x", limit=2.0), TypeError, "read_trace: limit must be an integer"),
        (lambda: generate_trace(2.0), TypeError, "num_requests must be an integer, got 2.0"),
        (lambda: generate_trace(2, seed=-1), ValueError, "generate_trace: seed must be >= 0"),
        (lambda: scale_lengths([], 2.0), TypeError, "divisor must be an integer, got 2.0"),
        (lambda: batches(token_budget=1.5), TypeError, "token_budget must be an integer, got 1.5"),
        (
            lambda: batches(token_budget=1, max_sequences=0),
            ValueError,
            "max_sequences must be >= 1",
        ),
        (
            lambda: PrefixCache(2, page_size=4.0, block_tokens=8),
            TypeError,
            "PrefixCache: page_size must be an integer, got 4.0",
        ),
        (
            lambda: Checker(DenseConfig(), block_tokens=8, rows_per_chunk=1.5),
            TypeError,
            "Checker: rows_per_chunk must be an integer, got 1.5",
        ),
        (lambda: calibrate(AttentionLayer(), threads=0), ValueError, "threads must be >= 1, got 0"),
        (lambda: calibrate(AttentionLayer(), threads=1.5), TypeError, "threads must be an integer"),
    ],
)
def test_numbers_are_refused_by_rule(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
