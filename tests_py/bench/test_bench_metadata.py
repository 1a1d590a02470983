# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_metadata.py that a wrong benchmark would come from, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import case_tables
import pytest
from case_tables import compared, missed

from bench.context_parallel import metadata
from bench.harness import program, runner
from bench.harness.comparison import Wrong, times_as_fast
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


@pytest.mark.parametrize("met", [True, False])
def test_the_document_shows_new_results_like_stored_ones(met, monkeypatch):
    """Those of before say their one bar by itself."""
    monkeypatch.setattr(case_tables, "reason", lambda figure: "why")
    median = 2e-6 if met else 5e-6
    ours = {"case": CASE, "implementation": "cpattn", "median": median, "percent_of_peak": 50.0}
    peer = {"case": CASE, "implementation": "python", "median": 4e-5}
    stored = [ours | {"bar": 20, "missed": not met, "speedup": 4e-5 / median}, peer]
    bar = times_as_fast("cpattn", "python", 20, "python")
    new = [ours | {"bars": [bar.judge({"cpattn": ours, "python": peer})]}, peer]
    assert [*compared(stored)] == [*compared(new)]
    count, *tables = missed(new)
    assert count == next(missed(stored)) == f"{int(met)} of 1 bars met."
    assert bool(tables) != met
    if tables:
        why, table = tables
        assert why == "Missed: why"
        assert table.splitlines()[-1].endswith("| times as fast as python: 8 | ≥ 20 |")
