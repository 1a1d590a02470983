# SPDX-License-Identifier: Apache-2.0
"""The tables of bench_attention.py: one after each case, and the bars at the end."""

from __future__ import annotations

from rich.table import Table

from bench.harness.figures import Row, amx_bar, case_label, duration, findings, of_cpattn, verdict
from bench.harness.report import console


def print_case(rows: list[Row], progress: str) -> None:
    table = Table(title=f"[{progress}] {case_label(rows[0]['case'])}", title_justify="left")
    ours = next(iter(of_cpattn(rows)), None)
    names = ["median", "staging", "samples", "spread", "rate", "of peak", "cpattn is"]
    names += ["memory", "error"]
    table.add_column("implementation", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["implementation"], *[""] * len(names), _reason(row))
            continue
        notes = [row["note"], "noisy" if row["noisy"] else "", verdict(row)]
        table.add_row(
            row["implementation"],
            duration(row["median"]),
            duration(row["staging"]) if row["staging"] > 1e-5 else "",
            f"{row['samples']} of {row['samples'] + row['dropped']}",
            f"{row['spread'] / row['median']:.0%}",
            f"{row['rate']:.1f} {row['unit']}/s",
            f"{row['percent_of_peak']:.0f} %",
            f"{row['median'] / ours['median']:.2f} ×" if ours and row is not ours else "",
            f"{row['extra_memory'] / 2**20:.0f} MiB",
            f"{row['error']:.1g}",
            ", ".join(filter(None, notes)),
        )
    console().print(table)


def print_summary(rows: list[Row]) -> None:
    table = Table(title="Bars", title_justify="left")
    for name in ("case", "of peak", "bar", "best peer", "cpattn is", "with AMX"):
        table.add_column(name, justify="left" if name in ("case", "best peer") else "right")
    for row in rows:
        if "bar" in row:
            table.add_row(
                case_label(row["case"]),
                f"{row['percent_of_peak']:.1f} %",
                verdict(row),
                row.get("best_peer", ""),
                f"{row['speedup']:.2f} ×" if "speedup" in row else "",
                amx_bar(row),
            )
    output = console()
    output.print(table)
    for line in findings(rows):
        output.print(line)


def _reason(row: Row) -> str:
    return f"{row['status']}: {row['reason'][:110]}"
