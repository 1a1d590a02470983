# SPDX-License-Identifier: Apache-2.0
"""Draws bench/results: roofline, speed-ups, scaling; extends; sparse attention; KV transfer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import matplotlib

matplotlib.use("agg")

import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bench.attention.peers import NAMES
from bench.harness.environment import RESULTS
from bench.harness.figures import Row, is_auxiliary

SPARSE_COLORS = ["#000000", *map(to_hex, colormaps["tab10"](range(10)))]
COLORS = dict(zip(NAMES.values(), SPARSE_COLORS, strict=False))
MARKERS = dict(zip(NAMES.values(), "osD^vPX*", strict=True))


def read(bench: str) -> list[Row]:
    path = RESULTS / f"{bench}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["status"] == "ok"]


def style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def machine(row: Row) -> str:
    threads = row["num_threads"]
    return f"{row['machine']}, {threads} threads, {row['isa']}, {row['date']}"


def draw_roofline(rows: list[Row]) -> Figure:
    """Achieved flop/s over the flops that each byte of compulsory traffic allows."""
    most = max(row["case"]["threads"] for row in rows)
    rows = [r for r in rows if r["case"]["threads"] == most and r["shape"]["dtype"] == "bfloat16"]
    compute = max(row["peak"] for row in rows if row["unit"] == "GFLOP")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    found = [row["intensity"] for row in rows]
    intensities = np.geomspace(min(found) / 2, max(found) * 2, 500)
    bandwidths = [row["peak"] for row in rows if row["unit"] == "GB"]
    roof = np.full_like(intensities, compute)
    if bandwidths:
        roof = np.minimum(roof, intensities * max(bandwidths))
        axes.text(
            intensities[0],
            roof[0] * 1.25,
            f"  {max(bandwidths):.0f} GB/s read",
            rotation=35,
            rotation_mode="anchor",
            fontsize=9,
        )
    axes.loglog(intensities, roof, color="0.4")
    axes.text(intensities[-1], compute * 1.06, f"{compute:.0f} GFLOP/s", ha="right", fontsize=9)
    for name in COLORS:
        mine = [row for row in rows if row["implementation"] == name]
        axes.loglog(
            [row["intensity"] for row in mine],
            [row["gflop"] / row["median"] for row in mine],
            MARKERS[name],
            color=COLORS[name],
            label=name,
            ms=5,
            alpha=0.8,
            zorder=3 if name == "cpattn" else 2,
        )
    style(
        axes,
        f"Roofline, bfloat16\n{machine(rows[0])}",
        "flop per byte of q, K, V and output",
        "GFLOP/s",
    )
    axes.legend(fontsize=8, loc="lower right")
    return figure


def shown(row: Row) -> bool:
    """Whether a case is shown: not if it only belongs to a curve."""
    return "bar" in row or not row["series"]


def draw_speedups(rows: list[Row]) -> Figure:
    """Draw the speed-up of cpattn over each peer, case by case."""
    cases = []
    for case, group in groupby(rows, key=lambda row: row["case"]):
        of = {row["implementation"]: row for row in group}
        if len(of) > 1 and "cpattn" in of and shown(of["cpattn"]):
            cases.append((case, of))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.42 * len(cases)), layout="constrained")
    for y, (_, of) in enumerate(cases):
        ours = of["cpattn"]["median"]
        for name in [*COLORS][1:]:
            if name in of:
                axes.semilogx(of[name]["median"] / ours, y, MARKERS[name], color=COLORS[name], ms=7)
    axes.axvline(1, color="black")
    labels = [
        f"{case['workload']}, {case['threads']} thread{'s' * (case['threads'] > 1)}"
        for case, _ in cases
    ]
    axes.set_yticks(range(len(cases)), labels)
    axes.invert_yaxis()
    taking_part = {name for _, of in cases for name in of}
    for name in [*COLORS][1:]:
        if name in taking_part:
            axes.plot([], [], MARKERS[name], color=COLORS[name], label=name)
    ticks = [1, 3, 10, 30, 100]
    axes.set_xticks(ticks, [f"{tick} ×" for tick in ticks], minor=False)
    axes.minorticks_off()
    style(
        axes,
        f"Time of each engine in units of cpattn's\n{machine(rows[0])}",
        "time, cpattn's = 1 ×",
        "",
    )
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center"
    )
    return figure


def draw_scaling(rows: list[Row], series: str, title: str, label: str) -> Figure:
    """Percent of the peak along a series of cases, a line per engine."""
    points = [row for row in rows if row["series"] and row["series"][0] == series]
    points.sort(key=lambda row: row["series"][1])
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in COLORS:
        mine = [row for row in points if row["implementation"] == name]
        if mine:
            axes.semilogx(
                [r["series"][1] for r in mine],
                [r["percent_of_peak"] for r in mine],
                f"-{MARKERS[name]}",
                color=COLORS[name],
                label=name,
                ms=5,
                lw=2 if name == "cpattn" else 1,
            )
    ticks = sorted({row["series"][1] for row in points})
    axes.set_xticks(ticks, [f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    style(axes, f"{title}\n{machine(rows[0])}", label, "percent of the dot-product peak")
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return figure


def draw(rows: list[Row]) -> Iterable[tuple[str, Figure]]:
    yield "roofline", draw_roofline(rows)
    yield "speedup", draw_speedups(rows)
    heads = "32 query and 8 KV heads × 128, bfloat16"
    yield "length", draw_scaling(rows, "length", f"One causal sequence, {heads}", "tokens")
    title = f"256 new tokens behind 1024 cached each, {heads}"
    yield "batch", draw_scaling(rows, "batch", title, "sequences")


HEADS = 64  # of the indexer


def draw_sparse(rows: list[Row]) -> Figure:
    """Indexer and top-k over the length of the keys, MLA over the number of heads."""
    most = max(row["case"]["threads"] for row in rows)
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    indexer = [
        row
        for row in rows
        if row["case"]["job"].startswith("indexer, top")
        and row["case"]["heads"] == HEADS
        and not is_auxiliary(row)
    ]
    draw_lines(axes[0], [row for row in indexer if row["case"]["threads"] == most], "KV")
    style(axes[0], f"Indexer, {HEADS} heads × 128, {most} threads", "keys", "ns per query and key")
    draw_lines(axes[1], [row for row in rows if row["case"]["job"] == "top 2048"], "of")
    style(axes[1], "Top 2048, one thread", "elements of a row", "ns per element")
    mla = [row for row in rows if row["part"] == "sparse MLA" and row["case"]["threads"] == most]
    draw_lines(axes[2], mla, "heads", "percent_of_peak")
    axes[2].set_yscale("linear")
    axes[2].set_ylim(0, 100)
    axes[2].set_yticks(range(0, 101, 20), map(str, range(0, 101, 20)))
    style(
        axes[2],
        f"MLA 576/512, 2048 keys a token, {most} threads",
        "heads",
        "percent of the bfloat16 dot-product peak",
    )
    figure.suptitle(machine(rows[0]), fontsize=11)
    return figure


def draw_lines(axes: Axes, rows: list[Row], x: str, y: str = "ns_per_item") -> None:
    """A line for each implementation, cpattn's thicker, over one entry of the case."""
    for i, name in enumerate(dict.fromkeys(row["implementation"] for row in rows)):
        mine = sorted(
            (row for row in rows if row["implementation"] == name), key=lambda row: row["case"][x]
        )
        axes.loglog(
            [row["case"][x] for row in mine],
            [row[y] for row in mine],
            "-" + "osD^vPX*"[i],
            color=SPARSE_COLORS[i],
            label=name,
            ms=5,
            lw=2 if name.startswith("cpattn") else 1,
        )
    ticks = sorted({row["case"][x] for row in rows})
    axes.set_xticks(ticks, [f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])
    show_numbers(axes, [row[y] for row in rows])
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def show_numbers(axes: Axes, values: list[float]) -> None:
    """Label a logarithmic y axis with plain numbers, 1, 2 and 5 of each decade."""
    steps = [m * 10.0**e for e in range(-2, 4) for m in (1, 2, 5)]
    shown = [t for t in steps if min(values) / 2.5 <= t <= max(values) * 2.5]
    axes.set_yticks(shown, [f"{t:g}" for t in shown])
    axes.minorticks_off()


PAGE_KIB = 4  # of the pages that are sent


def draw_transfer(rows: list[Row]) -> Figure:
    """Bytes over the engine by the length of runs, and the time of plans."""
    parts = {
        draw_sending: [row for row in rows if "run" in row["case"]],  # none without the engine
        draw_planning: [row for row in rows if row["part"] == "planning"],
    }
    parts = {draw: mine for draw, mine in parts.items() if mine}
    size = 6 * len(parts), 4.5
    figure, axes = plt.subplots(1, len(parts), figsize=size, layout="constrained", squeeze=False)
    for (draw, mine), panel in zip(parts.items(), axes[0], strict=True):
        draw(panel, mine)
    figure.suptitle(machine(rows[0]), fontsize=11)
    return figure


def draw_sending(axes: Axes, rows: list[Row]) -> None:
    labels = {"cpattn": "a block for each run"}
    for i, name in enumerate(dict.fromkeys(row["implementation"] for row in rows)):
        mine = [row for row in rows if row["implementation"] == name]
        axes.loglog(
            [row["case"]["run"] for row in mine],
            [row["rate"] for row in mine],
            "-" + "os"[i],
            color=SPARSE_COLORS[i],
            label=labels.get(name, name),
            lw=2 - i,
        )
    runs = sorted({row["case"]["run"] for row in rows})
    axes.set_xticks(runs, [f"{n}\n{n * PAGE_KIB} KiB" for n in runs])
    show_numbers(axes, [row["rate"] for row in rows])
    style(axes, "Mooncake, TCP on loopback, two processes", "pages of a run", "GB/s")
    axes.legend(fontsize=9)


def draw_planning(axes: Axes, rows: list[Row]) -> None:
    cases = list(dict.fromkeys(row["case"]["job"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for i, name in enumerate(names):
        mine = [row for row in rows if row["implementation"] == name]
        axes.semilogx(
            [1e6 * row["median"] for row in mine],
            [cases.index(row["case"]["job"]) for row in mine],
            "osD"[i],
            color=SPARSE_COLORS[i],
            label=name,
            ms=8,
        )
    axes.set_yticks(range(len(cases)), [case.removeprefix("plan, ") for case in cases])
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    shape = rows[0]["case"]
    style(axes, f"Plan of {shape['layers']} layers × 2 buffers × {shape['pages']} pages", "µs", "")
    axes.legend(fontsize=9)


#: What of the extends is drawn: as many panels as there are batches and dtypes of the cache.
DRAWN = {"cached": 8192, "KV heads": 8, "head_dim": 128}


def draw_extends(rows: list[Row]) -> Figure:
    """Each engine's share of the roofline over the new tokens of a sequence."""
    rows = [row for row in rows if DRAWN.items() <= row["case"].items()]
    panels = list(dict.fromkeys((row["case"]["batch"], row["case"]["cache"]) for row in rows))
    columns = len({cache for _, cache in panels})
    lines = -(-len(panels) // columns)
    size = 4.5 * columns, 3.6 * lines
    figure, axes = plt.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for panel, (batch, cache) in zip(axes.flat, panels, strict=False):
        mine = [
            row for row in rows if (row["case"]["batch"], row["case"]["cache"]) == (batch, cache)
        ]
        for name in dict.fromkeys(row["implementation"] for row in mine):
            own = sorted(
                (row["case"]["new"], row["percent_of_peak"])
                for row in mine
                if row["implementation"] == name
            )
            panel.plot(
                *zip(*own, strict=True),
                "-" + MARKERS[name],
                color=COLORS[name],
                label=name,
                ms=5,
                lw=2 if name == NAMES["ours"] else 1,
            )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        style(panel, f"{batch} × 8,192 cached, {cache}", "new tokens", "% of the roofline")
        panel.legend(fontsize=8)
    figure.suptitle(machine(rows[0]), fontsize=11)
    return figure


def main() -> None:
    figures = [*draw(read("attention"))]
    if transfer := read("transfer"):
        figures.append(("transfer", draw_transfer(transfer)))
    if sparse := read("sparse"):
        figures.append(("sparse", draw_sparse(sparse)))
    if extends := [row for row in read("extends") if row["part"] == "extends"]:
        figures.append(("extends", draw_extends(extends)))
    for name, figure in figures:
        figure.savefig(RESULTS / f"{name}.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
