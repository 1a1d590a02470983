# SPDX-License-Identifier: Apache-2.0
"""Plots of the HTML report, as SVG text whose labels take the font of the page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..records import TORCH_BASELINE, DecodeReport, ReplayReport

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLORS = {
    "attention": "#0072b2",
    "indexer": "#56b4e9",
    "top-k": "#f0e442",
    "gather": "#e69f00",
    "metadata": "#cc79a7",
    "stage": "#009e73",
    "rest": "#b8c0c8",
    "projections": "#b8c0c8",
    "torch": "#d55e00",
    "good": "#009e73",
    "ink": "#3c4650",
    "grid": "#e4e8ec",
}
# Colours that change with the page, which is dark if its reader prefers that.
_OF_PAGE = {COLORS["ink"]: "var(--axis)", COLORS["grid"]: "var(--line)"}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["ink"],
    "axes.labelcolor": COLORS["ink"],
    "text.color": COLORS["ink"],
    "axes.linewidth": 0.8,
    "xtick.color": COLORS["ink"],
    "ytick.color": COLORS["ink"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.1,
    "legend.handleheight": 0.9,
    "legend.columnspacing": 1.4,
}


class Plot:
    """One figure with its title; the with block that draws it sets `svg` at its end."""

    def __init__(self, name: str, title: str, note: str) -> None:
        self.name = name
        self.title = title
        self.note = note
        self.svg = ""

    @contextmanager
    def axes(self, ylabel: str, xlabel: str = "batch") -> Iterator[Any]:
        # The salt keeps ids of several figures in one page apart, and files reproducible.
        with mpl.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            figure = Figure(figsize=(5.4, 2.7), layout="constrained")
            axes = figure.add_subplot()
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)
            axes.yaxis.set_major_formatter(_format_tick)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            yield axes
            if axes.get_legend_handles_labels()[0]:
                figure.legend(loc="outside upper left", ncols=4, borderaxespad=0.1)
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        for color, variable in _OF_PAGE.items():
            svg = svg.replace(color, variable)
        self.svg = svg


def plots(report: ReplayReport) -> list[Plot]:
    """Draw all plots for which the report has data."""
    made = [_time(report), _tokens(report), _throughput(report)]
    if report.options.torch_baseline:
        made.append(_attention(report))
    made.append(_balance(report))
    if report.decode:
        made.append(_second_token(report.decode))
    if report.tolerance is not None:
        made.append(_error(report))
    return made


def _time(report: ReplayReport) -> Plot:
    plot = Plot(
        "time",
        "Time of a batch",
        "Mean over ranks, by phase; gather includes the wait for the slowest.",
    )
    with plot.axes("time [ms]") as axes:
        _stack(
            axes,
            report,
            {
                phase: ([1e3 * b.phases[phase] for b in report.batches], COLORS[phase])
                for phase in report.options.phases
            },
        )
    return plot


def _tokens(report: ReplayReport) -> Plot:
    plot = Plot("tokens", "Tokens of a batch", "Computed now, and read from the pool behind them.")
    with plot.axes("tokens") as axes:
        _stack(
            axes,
            report,
            {
                "new": ([b.new_tokens for b in report.batches], COLORS["attention"]),
                "prefix": ([b.prefix_tokens for b in report.batches], COLORS["rest"]),
            },
        )
    return plot


def _throughput(report: ReplayReport) -> Plot:
    plot = Plot(
        "throughput", "Throughput", "New tokens of a batch over the time of its slowest rank."
    )
    with plot.axes("tokens/s") as axes:
        axes.bar(
            _indices(report),
            [b.new_tokens / b.seconds for b in report.batches],
            width=0.82,
            color=COLORS["attention"],
        )
    return plot


def _attention(report: ReplayReport) -> Plot:
    name, how = TORCH_BASELINE[report.options.model.kind]
    plot = Plot(
        "attention",
        f"Attention: cpattn and {name}",
        f"{' + '.join(report.options.attention_phases).capitalize()}, all layers, mean over "
        f"ranks; torch {how}.",
    )
    phases = report.options.attention_phases
    x = _indices(report)
    with plot.axes("time [ms]") as axes:
        for i, (label, color, values) in enumerate(
            [
                ("cpattn", "attention", [sum(b.phases[p] for p in phases) for b in report.batches]),
                (name, "torch", [sum((b.torch_seconds or {}).values()) for b in report.batches]),
            ]
        ):
            axes.bar(
                [j + 0.41 * (i - 0.5) for j in x],
                [1e3 * value for value in values],
                width=0.39,
                color=COLORS[color],
                label=label,
            )
    return plot


def _balance(report: ReplayReport) -> Plot:
    plot = Plot(
        "balance", "Balance over ranks", "The most loaded rank over the mean; 1 is perfect."
    )
    from .summary import imbalance

    x = _indices(report)
    with plot.axes("slowest rank / mean") as axes:
        measured = [imbalance(b.rank_attention_seconds) for b in report.batches]
        planned = [imbalance(b.rank_pairs) for b in report.batches]
        style = {"linestyle": "none", "markersize": 4.5}
        axes.plot(x, measured, "o", color=COLORS["torch"], label="measured attention", **style)
        axes.plot(x, planned, "s", color=COLORS["good"], label="query-key pairs", **style)
        axes.axhline(1.0, color=COLORS["ink"], linewidth=0.8)
        axes.set_ylim(0.995, max(1.05, *measured, *planned) * 1.01)
    return plot


def _second_token(decode: DecodeReport) -> Plot:
    plot = Plot(
        "second-token",
        "Time to the second token",
        "From the beginning of prefill: all batches that a prompt has a part in, KV transfer "
        "behind them, and the first step of decoding.",
    )
    requests = sorted(decode.requests, key=lambda request: request.index)
    x, bottom = [request.index for request in requests], [0.0] * len(requests)
    with plot.axes("time [ms]", "request") as axes:
        for part, color in (("prefill", "attention"), ("transfer", "gather"), ("step", "torch")):
            heights = [1e3 * getattr(request, f"{part}_seconds") for request in requests]
            axes.bar(x, heights, bottom=bottom, width=0.82, color=COLORS[color], label=part)
            bottom = [b + height for b, height in zip(bottom, heights, strict=True)]
    return plot


def _error(report: ReplayReport) -> Plot:
    plot = Plot(
        "error",
        "Error of the result",
        "Against one process without cache; hidden states have unit size.",
    )
    checked = [b for b in report.batches if b.max_error is not None]
    with plot.axes("absolute error") as axes:
        axes.plot(
            [b.index for b in checked],
            [b.max_error for b in checked],
            "o",
            color=COLORS["attention"],
            markersize=4.5,
            label="largest error",
        )
        axes.axhline(report.tolerance, color=COLORS["torch"], linewidth=1.2, label="tolerance")
        axes.set_ylim(bottom=0.0)
    return plot


def _format_tick(y: float, _: float) -> str:
    return f"{y:,.0f}" if abs(y) >= 10 or y == 0 else f"{y:.4g}"


def _indices(report: ReplayReport) -> list[int]:
    return [batch.index for batch in report.batches]


def _stack(axes: Any, report: ReplayReport, parts: dict[str, tuple[list[Any], str]]) -> None:
    bottom = [0.0] * len(report.batches)
    for name, (values, color) in parts.items():
        axes.bar(_indices(report), values, bottom=bottom, width=0.82, color=color, label=name)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
