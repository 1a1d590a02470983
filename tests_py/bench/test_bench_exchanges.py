# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_exchanges.py and bench_scaling.py that a wrong benchmark would come from."""

import pytest

from bench.bench_scaling import crowded
from bench.context_parallel.exchanges import WAYS, Settings, Shape, predicted, rates_of
from cpattn_lab.cost_model import AttentionLayer, Rates, predict

SETTINGS = Settings((Shape(1024, 3072),), rounds=1)
BY_NAME = {way.name: way for way in WAYS}
RATES = Rates(gflops=100, gather_gb_per_s=1, store_gb_per_s=4)
SCALING = Rates(gflops=100, gather_gb_per_s=1, latency_us=100, message_us=10)
ROW = 2 * 8 * 128 * 2  # bytes of keys and values of a token
#: Bytes that each of two ranks receives of 1,024 new tokens behind 3,072, in pages of 128.
RECEIVED = {
    "replicated": 512 * ROW,
    "gather": (1536 + 512) * ROW,
    "ring": (256 + 2048) * ROW,  # new rows go to their owners first
    "pass_q": 256 * ROW + 512 * 32 * (128 * 2 + 128 * 2 + 4),
}


@pytest.mark.parametrize("name", RECEIVED)
def test_the_link_is_busy_for_the_bytes_that_cross_it(name):
    _, busy = predicted(SETTINGS.shapes[0], BY_NAME[name], 2, SETTINGS, RATES)
    assert busy == pytest.approx(RECEIVED[name] / 1e9)


@pytest.mark.parametrize(
    ("size", "cpus", "exchange", "slower", "share"),
    [
        (2, 2, "gather", 1, 1),
        (4, 2, "gather", 2, 0.75),
        (4, 4, "pass_q", 1, 0.75),
        (4, 2, "ring", 2, 1),
    ],
)
def test_ranks_of_a_host_share_cpus_and_the_link(size, cpus, exchange, slower, share):
    """Each of 2 ranks sends 2 of its 3 messages over the link: as 3 would at 3/4 of the rate."""
    rates = rates_of(RATES, BY_NAME[exchange], size, cpus, 2e9)
    assert rates.gflops == RATES.gflops / slower
    assert rates.store_gb_per_s == RATES.store_gb_per_s / slower
    assert rates.merge_ns == RATES.merge_ns * slower
    assert rates.gather_gb_per_s == 2 * share


def test_ranks_of_one_cpu_wait_for_each_other():
    layer, batch = AttentionLayer(num_heads=8, num_kv_heads=2), ([4096], [4096])
    free, waiting = (
        predict([batch], layer, crowded(SCALING, 8, cpus), cp_size=8) for cpus in (8, 2)
    )
    assert waiting.attention_seconds == pytest.approx(4 * free.attention_seconds)
    assert waiting.store_seconds == pytest.approx(4 * free.store_seconds)
    messages = 2 * (100e-6 + 7 * 10e-6)
    assert waiting.gather_seconds == pytest.approx(free.gather_seconds + 3 * messages)
