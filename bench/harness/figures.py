# SPDX-License-Identifier: Apache-2.0
"""The rows of bench/results in words and units; standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = dict[str, Any]


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def case_label(case: Mapping[str, Any]) -> str:
    return ", ".join(v if isinstance(v, str) else f"{k} {v}" for k, v in case.items())


def verdict(row: Row) -> str:
    """The bar of a row in percent of the peak, and whether it was reached."""
    return f"{row['bar']:g} % {'MISSED' if row['missed'] else 'met'}" if "bar" in row else ""


def time_per_item(row: Row) -> str:
    return f"{duration(1e-9 * row['ns_per_item'])}/{row['item']}"


def best_peer(rows: list[Row]) -> Row | None:
    """The fastest peer among the rows of a case of bench_sparse.py."""
    peers = [row for row in rows if "median" in row and not is_ours(row)]
    return min(peers, key=lambda row: row["median"], default=None)


def is_ours(row: Row) -> bool:
    """Whether a row of bench_sparse.py, in which cpattn runs in several dtypes, is cpattn's."""
    return row["implementation"].startswith("cpattn")


def is_auxiliary(row: Row) -> bool:
    """Whether a row is no implementation of the job, but the cost of a part of it."""
    return ", " in row["implementation"]


def bar_verdict(bar: Row) -> str:
    """One of several bars of a row: the figure, its reference, and whether it is enough."""
    sign = "≥" if bar["at_least"] else "≤"
    verdict = "met" if bar["met"] else "MISSED"
    return f"{bar['name']}: {bar['value']:.3g}, bar {sign} {bar['limit']:g} {verdict}"


def bars_of(row: Row) -> list[Row]:
    """All bars of a row, also in results with a single bar."""
    alone = [{"limit": row["bar"], "met": not row["missed"]}] if "bar" in row else []
    return [*alone, *row.get("bars", ())]


def amx_bar(row: Row) -> str:
    """The bar of AMX hardware in this case, for a machine without AMX."""
    if row["isa"] == "amx" or not row["amx_bar"]:
        return ""
    return f"{row['amx_bar']:g} %: not measured here"


def of_cpattn(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["implementation"] == "cpattn" and row["status"] == "ok"]


def limit(percent: float, bar: float) -> str:
    return f"{bar:g} % {'met' if percent <= bar else 'MISSED'}"


def findings(rows: list[Row]) -> Iterator[str]:
    """Comparisons of cases: threads, page sizes, ranks, and whether any peer was ahead."""
    ours = of_cpattn(rows)
    cases = {(row["case"]["workload"], row["case"]["threads"]): row for row in ours}
    for (name, threads), row in cases.items():
        one = cases.get((name, 1))
        if threads > 1 and one:
            times = row["rate"] / one["rate"]
            ideal = row["peak"] / one["peak"]
            yield (
                f"{name}: {threads} threads are {times:.2f} × as fast as one, "
                f"where the peak is {ideal:.2f} × as high"
            )
    for (name, threads), row in cases.items():
        base = cases.get((row.get("base"), threads))
        if base:
            change = 100 * (base["percent_of_peak"] / row["percent_of_peak"] - 1)
            bar = f" (bar: {limit(change, row['within'])})" if row["within"] else ""
            yield f"{name}: {change:+.1f} % time against {base['case']['workload']}{bar}"
    ranks = [row["percent_of_peak"] for row in ours if row["shape"]["cp"]]
    if len(ranks) > 1:
        apart = 100 * (max(ranks) / min(ranks) - 1)
        yield (
            f"ranks of the zigzag split: {min(ranks):.1f} to {max(ranks):.1f} % of the peak, "
            f"{apart:.1f} % apart (bar: {limit(apart, 2)})"
        )
    behind = [row for row in ours if row.get("speedup", 1) < 1]
    for row in behind:
        yield f"behind {row['best_peer']} ({row['speedup']:.2f} ×): {case_label(row['case'])}"
    compared = [row["speedup"] for row in ours if "speedup" in row]
    if compared and not behind:
        unstaged = min(row["speedup_unstaged"] for row in ours if "speedup" in row)
        yield (
            f"ahead of every peer in all {len(compared)} cases, by {min(compared):.2f} × or more; "
            f"by {unstaged:.2f} × with their staging left out"
        )
