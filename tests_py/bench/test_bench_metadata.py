# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_metadata.py that a wrong benchmark would come from, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.context_parallel import metadata
from bench.harness import program, runner
from bench.harness.comparison import Wrong
from bench.harness.figures import case_label

COMPARISONS = list(metadata.comparisons(quick=True))
CASE = {"read": "arrays", "cp": 8, "batch": 1}


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: case_label(c.case))
def test_quick_cases_give_whole_rows(comparison, monkeypatch):
    monkeypatch.setattr(runner, "peak_of", lambda comparison: lambda: 1e9)  # not to be measured
    rows = program.run(comparison, budget=0.01)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert [row["implementation"] for row in rows] == [metadata.OURS, metadata.PEER]
    for row in rows:
        assert row["case"] == comparison.case
        assert row["ns_per_item"] == 1e9 * row["median"] / comparison.case["batch"]
        assert row.keys().isdisjoint({"rate", "unit", "peak", "percent_of_peak"})


def test_wrong_metadata_is_found():
    comparison = COMPARISONS[0]
    result = comparison.implementations[metadata.PEER]()
    assert comparison.check(metadata.OURS, result) == 0
    result[3][0] += 1
    with pytest.raises(Wrong, match="not equal"):
        comparison.check(metadata.OURS, result)


def test_what_stops_in_a_sample_is_a_row(monkeypatch):
    calls = []

    def stopping():
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("why")

    monkeypatch.setattr(runner, "peak_of", lambda comparison: lambda: 1e9)
    stops = replace(COMPARISONS[0], implementations={"peer": stopping}, check=lambda *_: 0.0)
    (row,) = runner.run(stops, budget=1.0)
    assert (row["status"], row["reason"]) == ("error", "MemoryError: why")
