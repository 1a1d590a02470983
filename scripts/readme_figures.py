# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of bench/results into the README, between its two markers.

The cases that have a bar to reach are shown; the files hold them all.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/readme_figures.py -->\n", "<!-- end of figures -->\n"

Row = dict[str, Any]


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def cell(row: Row) -> str:
    text = duration(row["median"])
    if "unit" in row:
        text += f", {row['rate']:.0f} {row['unit']}/s"
    if "percent_of_peak" in row:
        text += f" ({row['percent_of_peak']:.0f} % of peak)"
    return text


def table(rows: list[Row]) -> str:
    """One benchmark's table: a line per case, a column per implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = [
        ["", *names, f"speed-up over {names[-1]}", "bar"],
        ["---"] + ["--:"] * (len(names) + 2),
    ]
    for case, group in groupby(rows, key=itemgetter("case")):
        of = {row["implementation"]: row for row in group}
        first = of[names[0]]
        if "bar" in first:
            label = ", ".join(v if isinstance(v, str) else f"{k} {v}" for k, v in case.items())
            cells = [cell(of[name]) if name in of else "" for name in names]
            missed = " (missed)" if first["missed"] else ""
            lines.append(
                [label, *cells, f"{first['speedup']:.3g} ×", f"{first['bar']:g} ×{missed}"]
            )
    made = rows[0]
    caption = (
        f"`bench/bench_{made['bench']}.py`: {made['machine']}, {made['num_threads']} threads, "
        f"`{made['isa']}`, {made['compiler']}, torch {made['torch']}, {made['date']}; medians."
    )
    return caption + "\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figures() -> str:
    tables = []
    for path in sorted((ROOT / "bench" / "results").glob("*.jsonl")):
        tables.append(table([json.loads(line) for line in path.read_text().splitlines()]))
    return "\n".join(tables)


def with_figures(readme: str) -> str:
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n{figures()}\n{END}", readme, flags=re.DOTALL)


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            with_figures(text) != text and f"README.md is older than bench/results: {sys.argv[0]}"
        )
    README.write_text(with_figures(text), encoding="utf-8")
