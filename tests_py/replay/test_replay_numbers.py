# SPDX-License-Identifier: Apache-2.0
"""Numbers and names that would do nothing, or something else, are refused where they are given.
The command line refuses others; see cli/test_cli_errors.py."""

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.scheduler import prefill_batches
from cpattn_lab.cost_model.calibration import calibrate
from cpattn_lab.cost_model.layer import AttentionLayer
from cpattn_lab.cost_model.rates import Rates
from cpattn_lab.replay.dense.check import Checker
from cpattn_lab.replay.dense.model import DenseConfig
from cpattn_lab.replay.dsa.model import DsaConfig
from cpattn_lab.replay.records import ReplayOptions
from cpattn_lab.traffic.trace import generate_trace, read_trace, scale_lengths
from support.replay.replay_models import SMALL_DSA

DECODED = {"placement": "page_interleave", "decode_tokens": 2}


def batches(**options: Any) -> Any:
    return next(prefill_batches(generate_trace(1), cache(), **options))


def cache(num_pages: int = 8, page_size: Any = 4, **options: Any) -> PrefixCache:
    return PrefixCache(num_pages, page_size=page_size, block_tokens=8, **options)


def checker(rows_per_chunk: Any) -> Checker:
    return Checker(DenseConfig(), block_tokens=8, rows_per_chunk=rows_per_chunk)


ZERO_IS_FINE = ("num_threads", "check_rows", "decode_tokens", "seed")


@pytest.mark.parametrize(
    "make",
    [ReplayOptions, DenseConfig, DsaConfig, AttentionLayer, partial(Rates, gflops=1.0)],
    ids=lambda make: getattr(make, "func", make).__name__,
)
def test_every_number_of_settings_is_checked(make):
    kind = getattr(make, "func", make)
    wrong = {"int": ["9", True, 2.5, -1, 0], "float": ["9", True, -1, math.nan, math.inf]}
    for name, type_name in ((field.name, field.type) for field in fields(kind)):
        for value in wrong.get(type_name, ()):
            if value == 0 and name in ZERO_IS_FINE:
                continue
            is_type = value in ("9", True, 2.5)
            message = f"^{kind.__name__}: {name} must be"
            with pytest.raises(TypeError if is_type else ValueError, match=message):
                make(**{name: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ReplayOptions(placement="page_interleave:2"), "must be .* 'page_interleave:2'"),
        (lambda: ReplayOptions(placement=None), "got None"),
        (lambda: ReplayOptions(model=SMALL_DSA, **DECODED), "dsa .* decoded, got page_interleave"),
        (lambda: ReplayOptions(hosts=128, cp_size=128), "at most 64, got 128"),
        (lambda: ReplayOptions(hosts=2, link_gbps=0.0), "link_gbps must be positive and finite"),
        (lambda: DenseConfig(kv_dtype="int4"), "kv_dtype must be bf16, fp8, .* got 'int4'"),
        (lambda: replace(SMALL_DSA, kv_dtype="fp8"), "for fp8 rows, got 64, 16, 32, float32"),
        (lambda: read_trace("x", limit=-1), "read_trace: limit must be >= 1, got -1"),
        (lambda: generate_trace(2.0), "num_requests must be an integer, got 2.0"),
        (lambda: generate_trace(2, seed=-1), "generate_trace: seed must be >= 0"),
        (lambda: scale_lengths([], 2.0), "divisor must be an integer, got 2.0"),
        (lambda: batches(token_budget=1.5), "token_budget must be an integer, got 1.5"),
        (lambda: batches(token_budget=1, max_sequences=0), "max_sequences must be >= 1"),
        (lambda: cache(page_size=4.0), "PrefixCache: page_size must be an integer, got 4.0"),
        (lambda: cache(shard_size=3), "num_pages must be a multiple of shard_size 3, got 8"),
        (lambda: cache(shard_size=0), "shard_size must be >= 1, got 0"),
        (lambda: checker(1.5), "Checker: rows_per_chunk must be an integer, got 1.5"),
        (lambda: calibrate(AttentionLayer(), threads=1.5), "threads must be an integer"),
    ],
)
def test_numbers_are_refused_by_rule(call, message):
    is_type = "an integer" in message or "a number" in message
    with pytest.raises(TypeError if is_type else ValueError, match=message):
        call()
