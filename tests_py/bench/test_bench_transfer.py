# SPDX-License-Identifier: Apache-2.0
"""The parts of bench/transfer and bench_metadata.py that a wrong benchmark would come from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cpattn
from bench import bench_transfer
from bench.context_parallel import metadata, plans
from bench.harness import runner
from bench.harness.comparison import Wrong
from bench.harness.contender import Failed
from bench.transfer import engine, planning, receiver, scatter
from bench.transfer.receiver import Receiver


@pytest.fixture(autouse=True)
def peak(monkeypatch):
    """Set the peak, which is not to be measured."""
    monkeypatch.setattr(runner, "peak_of", lambda comparison: lambda: 1e9)


@pytest.mark.parametrize(
    ("order", "runs"), [("shuffled", None), ("half contiguous", 51), ("contiguous", 1)]
)
def test_orders_of_pages_have_the_runs_they_say(order, runs):
    pages = planning.ORDERS[order](100, 7)
    assert len(np.unique(pages)) == len(pages) == 100
    found = 1 + np.count_nonzero(np.diff(pages) != 1)
    assert found == runs if runs else found > 90


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
    """Memory of this process in the place of another's; what is written there."""
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
    assert not loopback.any()  # for the next one to write
    code = send()
    loopback[-1] = 1  # of a page that nobody sends
    with pytest.raises(Wrong, match="bytes"):
        comparison.check(name, code)
    with pytest.raises(Wrong, match="code -1"):
        comparison.check(name, -1)


def test_runs_have_holes_between_them():
    assert engine.in_runs(8, 4).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert engine.in_runs(4, 1).tolist() == [0, 2, 4, 6]


def test_a_missing_engine_is_no_failure(monkeypatch):
    def missing(size):
        raise Failed(bench_transfer.ABSENT, "No module named 'mooncake'")

    monkeypatch.setattr(engine, "receiver", missing)
    monkeypatch.setattr("sys.argv", ["bench_transfer.py", "--quick", "--only", "send half"])
    assert bench_transfer.main() == 0


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_the_file_lies_in_memory_if_there_is_room(free, monkeypatch):
    monkeypatch.setattr(receiver.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert (receiver._folder(1 << 20) is not None) == (free > 0)


METADATA = next(metadata.comparisons(quick=True))


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


def test_wrong_metadata_is_found():
    comparison = METADATA
    result = comparison.implementations[metadata.PEER]()
    assert comparison.check(metadata.OURS, result) == 0
    result[3][0] += 1
    with pytest.raises(Wrong, match="not equal"):
        comparison.check(metadata.OURS, result)


def test_what_stops_in_a_sample_is_a_row():
    calls = []

    def stopping():
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("why")

    stops = replace(METADATA, implementations={"peer": stopping}, check=lambda *_: 0.0)
    (row,) = runner.run(stops, budget=1.0)
    assert (row["status"], row["reason"]) == ("error", "MemoryError: why")
