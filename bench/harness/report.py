# SPDX-License-Identifier: Apache-2.0
"""The tables of comparisons: one after each case, and the bars at the end."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bench.harness.figures import Row, bar_verdict, case_label, duration, is_ours, time_per_item

NUMBERS = ("median", "samples", "spread", "per item", "rate", "of peak", "cpattn is", "error")


def console() -> Console:
    made = Console()
    return made if made.is_terminal else Console(width=150)


def print_case(rows: list[Row], progress: str) -> None:
    table = Table()
    table.add_column("implementation", no_wrap=True)
    timed = "median" in rows[0]
    for name in NUMBERS if timed else ("figure",):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for row in rows:
        cells = _timed(row, rows[0]) if "median" in row else [_figure(row)]
        cells = cells if row["status"] == "ok" else [""] * (len(NUMBERS) if timed else 1)
        table.add_row(row["implementation"], *cells, _note(row))
    output = console()
    output.print(f"{progress}: {case_label(rows[0]['case'])}", style="italic")
    output.print(table)
    for row in rows:
        for bar in row.get("bars", ()):
            output.print(f"  {row['implementation']}: {bar_verdict(bar)}")


def _timed(row: Row, ours: Row) -> list[str]:
    rate = row.get("rate", 0)
    return [
        duration(row["median"]),
        f"{row['samples']} of {row['samples'] + row['dropped']}",
        f"{row['spread'] / row['median']:.0%}",
        time_per_item(row),
        f"{rate:{'.0f' if rate >= 100 else '.3g'}} {row['unit']}/s" if "unit" in row else "",
        f"{row['percent_of_peak']:.1f} %" if "percent_of_peak" in row else "",
        f"{row['median'] / ours['median']:.2f} ×" if row is not ours and is_ours(ours) else "",
        f"{row['error']:.1g}",
    ]


def _figure(row: Row) -> str:
    if "recall" in row:
        return f"{100 * row['recall']:.2f} %"
    return f"{row['extra_memory'] / 2**20:.1f} MiB" if "extra_memory" in row else ""


def _note(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason'][:110]}"
    return "noisy" if row.get("noisy") else ""


def print_bars(rows: list[Row]) -> None:
    table = Table()
    for name in ("case", "implementation", "bar"):
        table.add_column(name)
    for row in rows:
        for bar in row.get("bars", ()):
            table.add_row(case_label(row["case"]), row["implementation"], bar_verdict(bar))
    if table.rows:
        console().print("Bars", table)
