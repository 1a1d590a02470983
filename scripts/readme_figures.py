# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of bench/results into the README, between its two markers.

The cases that have a bar to reach are shown; the files hold them all.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from figures import (  # noqa: E402 (bench is no package)
    Row,
    amx_bar,
    bar_verdict,
    best_peer,
    case_label,
    duration,
    findings,
    is_auxiliary,
    is_ours,
    of_cpattn,
    time_per_item,
    verdict,
)

README = ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/readme_figures.py -->\n", "<!-- end of figures -->\n"
PLOTS = {
    "sparse": "sparse attention: indexer, top-k, MLA",
    "speedup": "time of each engine in units of cpattn's",
    "length": "percent of the peak over the length of a sequence",
    "batch": "percent of the peak over the batch size",
    "roofline": "roofline",
}


def cell(row: Row) -> str:
    text = duration(row["median"])
    if "unit" in row:
        text += f", {row['rate']:.0f} {row['unit']}/s"
    if "percent_of_peak" in row:
        text += f" ({row['percent_of_peak']:.0f} % of peak)"
    return text


def markdown(lines: list[list[str]]) -> str:
    rule = ["---"] + ["--:"] * (len(lines[0]) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], rule, *lines[1:]])


def compared(rows: list[Row]) -> str:
    """A benchmark in one process: a line per case, a column per implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = [["", *names, f"speed-up over {names[-1]}", "bar"]]
    for case, group in groupby(rows, key=itemgetter("case")):
        of = {row["implementation"]: row for row in group}
        first = of[names[0]]
        if "bar" in first:
            cells = [cell(of[name]) if name in of else "" for name in names]
            missed = " (missed)" if first["missed"] else ""
            bar = f"{first['bar']:g} ×{missed}"
            lines.append([case_label(case), *cells, f"{first['speedup']:.3g} ×", bar])
    return markdown(lines)


def doubt(row: Row) -> str:
    """What is to be known of a median that hardly is one."""
    if row["noisy"]:
        return " (no quiet sample)"
    return " (1 quiet sample)" if row["samples"] == 1 else ""


def raced(rows: list[Row]) -> str:
    """A race: cpattn, the best of its peers and the commonest one, and what compares cases."""
    rest = ["best peer", "speed-up over it", "torch SDPA", "extra memory", "bar with AMX"]
    lines = [["", "cpattn", "of peak", "bar", *rest]]
    for case, group in groupby(rows, key=itemgetter("case")):
        of = {row["implementation"]: row for row in group if row["status"] == "ok"}
        ours = of.get("cpattn")
        if ours is None or not ("bar" in ours or ("best_peer" in ours and not ours["series"])):
            continue
        share = {name: f"{row['percent_of_peak']:.0f} %" for name, row in of.items()}
        best = ours.get("best_peer", "")
        lines.append(
            [
                case_label(case),
                f"{duration(ours['median'])}, {ours['rate']:.0f} {ours['unit']}/s{doubt(ours)}",
                f"{ours['percent_of_peak']:.1f} %",
                verdict(ours),
                f"{best}, {share[best]}" if best else "",
                f"{ours['speedup']:.2f} ×" if best else "",
                share.get("torch SDPA", ""),
                f"{ours['extra_memory'] / 2**20:.0f} MiB",
                amx_bar(ours),
            ]
        )
    return markdown(lines) + "\n" + "".join(f"- {line}\n" for line in findings(of_cpattn(rows)))


def sparse(rows: list[Row]) -> str:
    """Sparse attention: a line for each implementation of ours, then what has no time."""
    lines = [["", "", "time", "of peak", "best peer", "speed-up over it", "bars"]]
    for case, group in groupby(rows, key=itemgetter("case")):
        of = list(group)
        barred = any("bars" in row for row in of) and of[0]["part"] != "memory"
        if not (barred or of[0]["part"] in ("rows", "metadata")):
            continue
        best = best_peer(of)
        for row in filter(is_ours, of):
            if "median" in row and not is_auxiliary(row):
                peak = f"{row['percent_of_peak']:.1f} %" if "percent_of_peak" in row else ""
                doubts = " (no quiet sample)" if row["noisy"] else ""
                line = [case_label(case), row["implementation"], time_per_item(row) + doubts, peak]
                if best:
                    line += [f"{best['implementation']}, {time_per_item(best)}"]
                    line += [f"{best['median'] / row['median']:.2f} ×"]
                else:
                    line += ["", ""]
                lines.append([*line, "; ".join(map(bar_verdict, row.get("bars", ())))])
    return markdown(lines) + "\n" + "".join(f"- {line}\n" for line in untimed(rows))


def untimed(rows: list[Row]) -> Iterator[str]:
    """Memory and recall: a line for each case."""
    rows = [row for row in rows if row["part"] in ("memory", "recall")]
    for case, group in groupby(rows, key=itemgetter("case")):
        figures = []
        for row in group:
            if "recall" in row:
                figures.append(f"{row['implementation']} {100 * row['recall']:.2f} %")
            if "extra_memory" in row:
                verdicts = "".join(f" ({bar_verdict(bar)})" for bar in row.get("bars", ()))
                megabytes = row["extra_memory"] / 2**20
                figures.append(f"{row['implementation']} {megabytes:.1f} MiB{verdicts}")
        if figures:
            yield f"{case_label(case)}: {', '.join(figures)}"


#: How the rows of a benchmark are shown.
SHOWN = {"attention": raced, "sparse": sparse}


def tables() -> Iterator[str]:
    for path in sorted((ROOT / "bench" / "results").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        made = rows[0]
        yield (
            f"`bench/bench_{made['bench']}.py`: {made['machine']}, {made['num_threads']} threads, "
            f"`{made['isa']}`, {made['compiler']}, torch {made['torch']}, {made['date']}; medians."
        )
        yield SHOWN.get(made["bench"], compared)(rows)
    for name, text in PLOTS.items():
        if (ROOT / "bench" / "results" / f"{name}.png").exists():
            yield f"![{text}](bench/results/{name}.png)\n"


def with_figures(readme: str) -> str:
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    figures = "\n\n".join(text.rstrip("\n") for text in tables())
    return re.sub(pattern, lambda _: f"{BEGIN}\n{figures}\n\n{END}", readme, flags=re.DOTALL)


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            with_figures(text) != text and f"README.md is older than bench/results: {sys.argv[0]}"
        )
    README.write_text(with_figures(text), encoding="utf-8")
