# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_scaling.py that a wrong verdict would come from."""

from __future__ import annotations

import pytest

from bench.bench_scaling import Error, crowded, row_of, verdict
from bench.context_parallel.ranks import Measured
from cpattn.cost_model import AttentionLayer, Rates, predict

RATES = Rates(gflops=100, gather_gbps=1, latency_us=100, message_us=10)


def test_ranks_of_one_cpu_wait_for_each_other():
    layer, batch = AttentionLayer(num_heads=8, num_kv_heads=2), ([4096], [4096])
    free, waiting = (predict([batch], layer, crowded(RATES, 8, cpus), cp_size=8) for cpus in (8, 2))
    assert waiting.attention_seconds == pytest.approx(4 * free.attention_seconds)
    assert waiting.store_seconds == pytest.approx(4 * free.store_seconds)
    messages = 2 * (100e-6 + 7 * 10e-6)
    assert waiting.gather_seconds == pytest.approx(free.gather_seconds + 3 * messages)


def test_eight_ranks_are_one_row_within_a_hundred_columns():
    forecast = predict([([4096], [4096])], AttentionLayer(), RATES, cp_size=8)
    mine = [
        Measured(cpu, cpu, 0.01, int(forecast.sent_bytes[0])) for cpu in forecast.attention_seconds
    ]
    cells, errors = row_of("4 behind prefixes", forecast, forecast, mine)
    assert len(cells) == 9
    assert [(error.kind, error.relative) for error in errors] == [("CPU", 0), ("wall", 0)]
    assert sum(map(len, cells)) + 2 * len(cells) < 100


def test_what_is_missed_is_named():
    errors = [
        Error("short", "CPU", 0.019, -0.5),
        Error("near", "CPU", 0.03, -0.09),
        Error("far", "wall", 0.03, 0.2),
    ]
    told = verdict(errors)
    assert told[0].startswith("1 of 2 times of attention above 20 ms are within 10%")
    assert told[1:] == ["  far, wall: +20%"]
