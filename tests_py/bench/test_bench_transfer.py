# SPDX-License-Identifier: Apache-2.0
"""Parts of bench/transfer and bench/context_parallel whose faults would make benchmarks wrong."""

import numpy as np
import pytest

import cpattn
from bench.context_parallel import metadata, plans
from bench.context_parallel.exchanges import WAYS, Settings, Shape, predicted, rates_of
from bench.harness.comparison import Wrong
from bench.transfer import engine, planning, scatter
from bench.transfer.receiver import Receiver
from cpattn_lab.cost_model import Rates


@pytest.mark.parametrize("order", planning.ORDERS)
def test_peers_of_planning_agree(order):
    src, dst = (planning.ORDERS[order](50, seed).astype(np.int32) for seed in (3, 4))
    src_ptrs, dst_ptrs = np.arange(6, dtype=np.uint64) << 33, np.arange(6, dtype=np.uint64) << 40
    item_lens = np.array([4096, 4096, 512, 512, 512, 64], np.uint64)
    arrays = planning.in_numpy(src_ptrs, dst_ptrs, item_lens, src, dst)
    lists = planning.in_loops(src_ptrs.tolist(), dst_ptrs.tolist(), item_lens.tolist(), src, dst)
    for array, wanted in zip(arrays, lists, strict=True):
        assert array.ravel().tolist() == list(wanted)
    assert sum(lists[2]) == 50 * int(item_lens.sum())


def test_a_wrong_plan_or_write_is_found():
    comparison = next(planning.comparisons(quick=True))
    right = comparison.implementations[planning.NUMPY]()
    comparison.check(planning.NUMPY, right)
    right[1][0, 3] += 1
    with pytest.raises(Wrong, match="bytes"):
        comparison.check(planning.NUMPY, right)
    comparison = next(scatter.comparisons(quick=True))
    k, v = comparison.implementations[scatter.TORCH]()
    comparison.check(scatter.TORCH, (k, v))
    with pytest.raises(Wrong, match="bytes"):
        comparison.check(scatter.TORCH, (v, k))


@pytest.fixture
def loopback(monkeypatch):
    """Use memory of this process instead of another's; return it."""
    memory = np.zeros(engine.SIZE, np.uint8)
    to = Receiver(cpattn.transfer.LocalEngine(), "", memory.ctypes.data, memory)
    both = [memory, engine.source()]
    to.engine.register([side.ctypes.data for side in both], [side.nbytes for side in both])
    monkeypatch.setattr(engine, "receiver", lambda size: to._replace(session=to.engine.session_id))
    return memory


@pytest.mark.parametrize("name", [engine.OURS, engine.PLAIN])
def test_a_stray_byte_is_found(name, loopback):
    comparison = next(engine.comparisons(quick=True))
    send = comparison.implementations[name]
    comparison.check(name, send())
    assert not loopback.any()  # cleared for the next send
    code = send()
    loopback[-1] = 1  # a byte of a page that is not sent
    with pytest.raises(Wrong, match="bytes"):
        comparison.check(name, code)
    with pytest.raises(Wrong, match="code -1"):
        comparison.check(name, -1)


def test_plans_of_both_are_right_and_wrong_ones_are_found():
    made = list(plans.comparisons(quick=True))
    for comparison in made:
        for name, run in comparison.implementations.items():
            comparison.check(name, run())
    rows = made[0].implementations[plans.PEER]()
    rows[3][-1] += 1
    with pytest.raises(Wrong, match="not equal"):
        made[0].check(plans.PEER, rows)
    out, lse = made[-1].implementations[plans.OURS]()
    with pytest.raises(Wrong, match="relative error"):
        made[-1].check(plans.OURS, (1.5 * out, lse))
    comparison = next(metadata.comparisons(quick=True))
    result = comparison.implementations[metadata.PEER]()
    assert comparison.check(metadata.OURS, result) == 0
    result[3][0] += 1
    with pytest.raises(Wrong, match="not equal"):
        comparison.check(metadata.OURS, result)


SETTINGS = Settings((Shape(1024, 3072),), rounds=1)
BY_NAME = {way.name: way for way in WAYS}
RATES = Rates(gflops=100, gather_gb_per_s=1, store_gb_per_s=4)
ROW = 2 * 8 * 128 * 2  # bytes of keys and values of a token
#: Bytes that each of two ranks receives for 1,024 new tokens behind 3,072, in pages of 128.
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
    """Each of 2 ranks sends 2 of its 3 messages over the link, like 3 at 3/4 of the rate."""
    rates = rates_of(RATES, BY_NAME[exchange], size, cpus, 2e9)
    assert rates.gflops == RATES.gflops / slower
    assert rates.store_gb_per_s == RATES.store_gb_per_s / slower
    assert rates.merge_ns == RATES.merge_ns * slower
    assert rates.gather_gb_per_s == 2 * share
