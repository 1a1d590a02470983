# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of bench/results into docs/figures.md and the README, between two markers.

docs/figures.md has the cases with a bar to reach, and plots; the README some of them. The files in
bench/results hold everything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.harness.figures import (  # noqa: E402 (not on the path before)
    Row,
    amx_bar,
    bar_verdict,
    bars_of,
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

README, DOCUMENT = ROOT / "README.md", ROOT / "docs" / "figures.md"
BEGIN, END = "<!-- figures: scripts/readme_figures.py -->\n", "<!-- end of figures -->\n"
PLOTS = {
    "sparse": "sparse attention: indexer, top-k, MLA",
    "transfer": "KV transfer: bytes over the engine by length of runs, and time of plans",
    "speedup": "time of each engine in units of cpattn's",
    "length": "percent of the peak over the length of a sequence",
    "batch": "percent of the peak over the batch size",
    "roofline": "roofline",
}
#: The cases that the README shows, by the beginning of their labels.
HEADLINES = {
    "attention": (
        "2048 new behind 8192 cached",
        "causal 1 × 8192, threads 2",
        "MLA absorbed 576/512, 128 heads",
        "decode 16 × 1, KV 8192",
        "32K zigzag over 8, rank 7",
    ),
    "metadata": ("arrays",),
    "sparse": (
        "indexer, top 2048, heads 64, new 512, KV 65536, threads 2",
        "top 2048, of 65536",
        "sparse MLA, 2048 keys, heads 128, threads 2",
    ),
    "transfer": (
        "plan, shuffled",
        "write K and V, bfloat16 to bfloat16, tokens 32768, threads 2",
        "send half contiguous",
        "send runs of pages, pages 256, run 256",
    ),
    "sglang": ("zigzag, batch 256",),
    "transformers": ("prefill", "continuous batching"),
}
#: Parts with more cases than a document should have.
BARRED_ONLY = ("indexer", "top-k", "sparse MLA", "memory", "recall")
Lines = list[list[str]]


def cell(row: Row) -> str:
    text = duration(row["median"])
    if "unit" in row:
        text += f", {row['rate']:.0f} {row['unit']}/s"
    if "percent_of_peak" in row:
        text += f" ({row['percent_of_peak']:.0f} % of peak)"
    return text


def markdown(lines: Lines) -> str:
    rule = ["---"] + ["--:"] * (len(lines[0]) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], rule, *lines[1:]])


def compared(rows: list[Row]) -> Lines:
    """A benchmark in one process: a line per case, a column per implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = [["", *names, f"speed-up over {names[-1]}", "bar"]]
    for case, group in groupby(rows, key=itemgetter("case")):
        of = {row["implementation"]: row for row in group}
        first, peer = of[names[0]], of[names[-1]]
        for bar in bars_of(first):
            cells = [cell(of[name]) if name in of else "" for name in names]
            speedup = f"{peer['median'] / first['median']:.3g} ×"
            missed = "" if bar["met"] else " (missed)"
            lines.append([case_label(case), *cells, speedup, f"{bar['limit']:g} ×{missed}"])
    return lines


def doubt(row: Row) -> str:
    """What is to be known of a median that hardly is one."""
    if row["noisy"]:
        return " (no quiet sample)"
    return " (1 quiet sample)" if row["samples"] == 1 else ""


def raced(rows: list[Row]) -> Lines:
    """A race: cpattn, the best of its peers and the commonest one."""
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
    return lines


def in_turns(rows: list[Row]) -> Lines:
    """Comparisons within a process: a line for each implementation of ours."""
    lines = [["", "", "time", "of peak", "best peer", "speed-up over it", "bars"]]
    for case, group in groupby(rows, key=itemgetter("case")):
        of = list(group)
        barred = any("bars" in row for row in of) and of[0]["part"] != "memory"
        if not barred and of[0]["part"] in BARRED_ONLY:
            continue
        best = best_peer(of)
        for row in filter(is_ours, of):
            if "median" in row and not is_auxiliary(row):
                peak = f"{row['percent_of_peak']:.1f} %" if "percent_of_peak" in row else ""
                doubts = " (no quiet sample)" if row["noisy"] else ""
                rate = f", {row['rate']:.3g} GB/s" if row["unit"] == "GB" else ""
                time = time_per_item(row) + rate + doubts
                line = [case_label(case), row["implementation"], time, peak]
                if best:
                    line += [f"{best['implementation']}, {time_per_item(best)}"]
                    line += [f"{best['median'] / row['median']:.2f} ×"]
                else:
                    line += ["", ""]
                lines.append([*line, "; ".join(map(bar_verdict, row.get("bars", ())))])
    return lines


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


#: How the rows of a benchmark are shown, and what is said below them.
SHOWN = {"attention": raced, "sparse": in_turns, "transfer": in_turns, "transformers": in_turns}
SAID: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "attention": lambda rows: findings(of_cpattn(rows)),
    "sparse": untimed,
}


def bars(rows: list[Row]) -> str:
    """How many there are, and how many of them were reached."""
    met = [bar["met"] for row in rows for bar in bars_of(row)]
    return f"{sum(met)} of {len(met)} bars met"


def tables(brief: bool) -> Iterator[str]:
    for path in sorted((ROOT / "bench" / "results").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        made = rows[0]
        bench = made["bench"]
        yield (
            f"`bench/bench_{bench}.py`: {made['machine']}, {made['num_threads']} threads, "
            f"`{made['isa']}`, {made['compiler']}, torch {made['torch']}, {made['date']}; medians, "
            f"{bars(rows)}."
        )
        head, *lines = SHOWN.get(bench, compared)(rows)
        if brief:
            lines = [line for line in lines if line[0].startswith(HEADLINES[bench])]
        yield markdown([head, *lines])
        if bench in SAID and not brief:
            yield "".join(f"- {line}\n" for line in SAID[bench](rows))


def plots() -> Iterator[str]:
    for name, text in PLOTS.items():
        if (ROOT / "bench" / "results" / f"{name}.png").exists():
            yield f"![{text}](../bench/results/{name}.png)\n"


def with_figures(path: Path) -> str:
    """The text of a document, with figures of today."""
    made = tables(brief=True) if path == README else (*tables(brief=False), *plots())
    figures = "\n\n".join(text.rstrip("\n") for text in made)
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    written = f"{BEGIN}\n{figures}\n\n{END}"
    return re.sub(pattern, lambda _: written, path.read_text(encoding="utf-8"), flags=re.DOTALL)


if __name__ == "__main__":
    for path in (README, DOCUMENT):
        if sys.argv[1:] != ["--check"]:
            path.write_text(with_figures(path), encoding="utf-8")
        elif with_figures(path) != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.name} is older than bench/results: {sys.argv[0]}")
