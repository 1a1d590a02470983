# SPDX-License-Identifier: Apache-2.0
"""The tables that the results of benchmarks become."""

from __future__ import annotations

from pathlib import Path

import case_tables
import figure_tables
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


def test_the_readme_names_machine_dates_and_peers():
    table, said = write_figures.headlines()
    lines = table.splitlines()[2:]
    assert len(lines) == len(write_figures.HEADLINES)
    for line in lines:
        _, _, ours, peer, ratio, _ = (cell.strip() for cell in line.split("|"))
        assert ours
        assert ", " in peer
        assert float(ratio.split()[0]) > 1
    assert "AMD EPYC, 2 threads" in said
    assert "2026-" in said
    assert "](docs/figures/index.md)" in write_figures.README.read_text()


def test_a_number_keeps_its_unit():
    assert figure_tables.together("OpenVINO, 475 ms") == "OpenVINO, 475\u00a0ms"
    assert figure_tables.together("2048 new behind 8192 cached") == "2048 new behind 8192 cached"


def test_a_bar_missed_without_a_reason_stops(monkeypatch):
    row = {"bench": "attention", "isa": "neon", "num_threads": 2}
    figure = case_tables.Figure({"workload": "causal"}, "", row, None)
    with pytest.raises(SystemExit, match="no reason for attention, neon: causal"):
        case_tables.reason(figure)
