# SPDX-License-Identifier: Apache-2.0
"""The tables that the results of benchmarks become."""

from __future__ import annotations

from pathlib import Path

import case_tables
import pytest
import write_figures

ROOT = Path(__file__).parents[2]
# What fits into a page beside its navigation.
WIDEST = 100


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("path", write_figures.WRITERS, ids=lambda path: path.name)
def test_a_page_has_its_figures_in_narrow_tables(path):
    rows = rows_of("\n\n".join(write_figures.WRITERS[path]()))
    assert len(rows) > 4
    assert [row for row in rows if len(row) > WIDEST] == []


def test_pages_by_hand_are_narrow_too():
    rows = [row for path in write_figures.PAGES.glob("*.md") for row in rows_of(path.read_text())]
    assert [row for row in rows if len(row) > WIDEST] == []


def test_a_bar_missed_without_a_reason_stops(monkeypatch):
    row = {"bench": "attention", "isa": "neon", "num_threads": 2}
    figure = case_tables.Figure({"workload": "causal"}, "", row, None)
    with pytest.raises(SystemExit, match="no reason for attention, neon: causal"):
        case_tables.reason(figure)
