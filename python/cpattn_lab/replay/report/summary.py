# SPDX-License-Identifier: Apache-2.0
"""Summary of a replay, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpattn_terminal.tables import Row, print_table

from ..records import TORCH_BASELINE, BatchRecord, ReplayReport
from .decode import decode_figures, summarize_decode, tokens_checked
from .pools import pool_figures, summarize_pools

_MAX_LINES = 40  # batches in the table of the terminal
# Columns that a table leaves out, the first ones first, if it is too wide.
_LESS_IMPORTANT = (
    *("meta", "seqs", "rest", "proj", "tok/s", "balance", "stage", "top-k", "exch", "gather"),
    *("prefix", "send", "torch", "indexer", "attn"),
)
_SHORT = {"metadata": "meta", "attention": "attn", "projections": "proj"}
_LEGEND = {
    "ms": "ms: the slowest rank, phases: mean over ranks",
    "balance": "balance: most query-key pairs of a rank / mean",
    "exch": "exch: MiB that ranks send each other",
    "error": "error: largest, against the check",
    "send": "send: KV transfer, the slowest rank",
}


def summarize(report: ReplayReport) -> dict[str, Any]:
    """Return the figures over all batches, for the table, the JSON and the HTML."""
    batches, model = report.batches, report.options.model
    phases = {
        phase: sum(batch.phases[phase] for batch in batches) for phase in report.options.phases
    }
    pairs = [sum(rank) for rank in zip(*(b.rank_pairs for b in batches), strict=True)]
    attention = [sum(r) for r in zip(*(b.rank_attention_seconds for b in batches), strict=True)]
    own_seconds = sum(phases[phase] for phase in report.options.attention_phases)
    torch_seconds = sum(report.torch_seconds.values())
    errors = [b.max_error for b in batches if b.max_error is not None]
    over_codes = [b.error_over_codes for b in batches if b.error_over_codes is not None]
    return {
        "model": model.kind,
        "batches": len(batches),
        "new_tokens": report.new_tokens,
        "hit_rate": report.hit_tokens / report.input_tokens,
        "unbounded_hit_rate": report.unbounded_hit_tokens / report.input_tokens,
        "run_seconds": report.run_seconds,
        "new_tokens_per_second": report.new_tokens / report.run_seconds,
        "prompt_tokens_per_second": report.input_tokens / report.run_seconds,
        "phase_seconds": phases,
        "gflops_per_second": {
            phase: sum(batch.flops[phase] for batch in batches) / phases[phase] / 1e9
            for phase in batches[0].flops
        },
        "balance_pairs": imbalance(pairs),
        "balance_attention_seconds": imbalance(attention),
        "attention_seconds": own_seconds,
        "torch_attention_seconds": report.torch_seconds or None,
        "speedup_over_torch": torch_seconds / own_seconds if torch_seconds else None,
        "decode": summarize_decode(report),
        **summarize_pools(report),
        "peak_bytes_per_rank": max(report.peak_bytes),
        "max_error": max(errors) if errors else None,
        "error_over_codes": max(over_codes) if over_codes else None,
        "tolerance": report.tolerance,
        "passed": report.passed,
    }


def imbalance(per_rank: list[Any]) -> float:
    """Return the largest load over the mean: 1 is perfect, the number of ranks the worst."""
    mean = sum(per_rank) / len(per_rank)
    return float(max(per_rank) / mean) if mean else 1.0


def print_report(report: ReplayReport, title: str, console: Console | None = None) -> None:
    """Print the table and the figures below it on stdout."""
    options = report.options
    rows = []
    for batch in report.batches[:_MAX_LINES]:
        bad = report.tolerance is not None and (batch.max_error or 0.0) > report.tolerance
        rows.append(Row(table_row(batch, report), style="red" if bad else ""))
    console, header = print_table(
        f"{title}: {options.title}, {options.model.title}",
        table_header(report),
        rows,
        less_important=_LESS_IMPORTANT,
        console=console,
    )
    if len(report.batches) > _MAX_LINES:
        console.print(f"... and {len(report.batches) - _MAX_LINES} more batches")
    console.print(table_legend(report, header), highlight=False)
    console.print()
    console.print(_figures(report))


def table_header(report: ReplayReport) -> list[str]:
    """Return the column names of `table_row`; times are in ms, torch is attention by torch."""
    phases = [_SHORT.get(phase, phase) for phase in report.options.phases]
    header = ["#", "seqs", "new", "prefix", "tok/s", "ms", *phases, "balance"]
    if report.options.cp_size > 1:
        header.append("exch")
    if report.decode:
        header.append("send")
    if report.options.torch_baseline:
        header.append("torch")
    if report.tolerance is not None:
        header.append("error")
    return header


def table_legend(report: ReplayReport, header: Sequence[str]) -> str:
    """Explain the names of columns."""
    torch_text = f"torch: {TORCH_BASELINE[report.options.model.kind][1]}"
    texts = {**_LEGEND, "torch": torch_text}
    if report.options.is_sharded:
        texts["attn"] = "attn: with what ranks send for it"
        texts["torch"] = "torch: gathers the pages of a sequence from all ranks first"
    return "; ".join(texts[name] for name in header if name in texts)


def table_row(batch: BatchRecord, report: ReplayReport) -> list[str]:
    """Return one batch as text."""
    cells = [
        str(batch.index),
        str(batch.num_sequences),
        f"{batch.new_tokens:,}",
        f"{batch.prefix_tokens:,}",
        f"{batch.new_tokens / batch.seconds:,.0f}",
        _ms(batch.seconds),
        *(_ms(batch.phases[phase]) for phase in report.options.phases),
        f"{imbalance(batch.rank_pairs):.3f}",
    ]
    if report.options.cp_size > 1:
        cells.append(f"{sum(batch.rank_sent_bytes) / 2**20:,.1f}")
    if report.decode:
        cells.append(_ms(report.decode.transfers[batch.index].seconds))
    if report.options.torch_baseline:
        cells.append(_ms(sum(batch.torch_seconds.values()) if batch.torch_seconds else None))
    if report.tolerance is not None:
        cells.append("-" if batch.max_error is None else f"{batch.max_error:.1e}")
    return cells


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 1}f}"


def figures(report: ReplayReport) -> list[tuple[str, str]]:
    """Return the summary as (name, text) lines."""
    s, options = summarize(report), report.options
    total = sum(s["phase_seconds"].values())
    shares = ", ".join(f"{p} {100 * t / total:.1f} %" for p, t in s["phase_seconds"].items())
    lines = [
        (
            "traffic",
            f"{report.num_requests} requests, {report.input_tokens:,} prompt tokens "
            f"(lengths / {options.scale_lengths}) in {s['batches']} batches",
        ),
        (
            "prefix hits",
            f"{100 * s['hit_rate']:.1f} % of the prompt tokens (unbounded cache: "
            f"{100 * s['unbounded_hit_rate']:.1f} %), {report.evictions} blocks evicted",
        ),
        (
            "throughput",
            f"{s['new_tokens_per_second']:,.0f} new tokens/s, "
            f"{s['prompt_tokens_per_second']:,.0f} prompt tokens/s with the hits",
        ),
        ("time", f"{s['run_seconds']:.2f} s: {shares}"),
        (
            "balance",
            f"{s['balance_pairs']:.3f} by query-key pairs, "
            f"{s['balance_attention_seconds']:.3f} by measured attention (slowest rank / mean)",
        ),
        (
            "attention",
            ", ".join(f"{name} {speed:,.0f}" for name, speed in s["gflops_per_second"].items())
            + f" GFLOP/s over {options.num_ranks} ranks of "
            f"{report.environment['threads_per_rank']} thread(s), {report.environment['isa']}",
        ),
    ]
    if s["speedup_over_torch"]:
        lines.append((TORCH_BASELINE[options.model.kind][0], _torch_line(s)))
    lines += pool_figures(report)
    lines += decode_figures(report)
    lines.append(
        (
            "peak memory",
            f"{s['peak_bytes_per_rank'] / 2**20:,.0f} MiB in a rank, "
            + (f"{report.decode.peak_bytes / 2**20:,.0f} MiB decoding, " if report.decode else "")
            + f"{report.check_peak_bytes / 2**20:,.0f} MiB in the parent",
        )
    )
    lines.append(("check", check_line(report)))
    return lines


def _torch_line(summary: dict[str, Any]) -> str:
    """Say how long attention takes by torch and here, by phase if there are several."""
    torch_seconds, own = summary["torch_attention_seconds"], summary["phase_seconds"]

    def text(seconds: dict[str, float]) -> str:
        parts = ", ".join(f"{phase} {seconds[phase]:.2f}" for phase in torch_seconds)
        total = f"{sum(seconds[phase] for phase in torch_seconds):.2f} s"
        return f"{total} ({parts})" if len(torch_seconds) > 1 else total

    return f"{text(torch_seconds)}, cpattn {text(own)}: {summary['speedup_over_torch']:.2f} times"


def check_line(report: ReplayReport) -> str:
    """Say in one sentence whether the results were right."""
    if report.tolerance is None:
        return "not asked for"
    worst = max((b.max_error or 0.0 for b in report.batches), default=0.0)
    verdict = "passed" if report.passed else "FAILED"
    eps = torch.finfo(report.options.model.torch_dtype).eps
    keys = ""
    if report.checked_keys:
        keys = (
            f"; of {report.checked_keys:,} keys {report.swapped_keys:,} swapped with others of "
            "the same score but for roundings"
        )
    over_codes = [b.error_over_codes for b in report.batches if b.error_over_codes is not None]
    if over_codes:
        keys += (
            f"; attention over the codes {100 * max(over_codes):.0f} % of what roundings allow "
            "against the oracle on the same codes, so that the rest is the error of the codes"
        )
    return (
        f"{verdict}: {report.checked_rows:,} rows against one process without cache, largest "
        f"error {worst:.1e}, tolerance {report.tolerance:.1e} ({report.tolerance / eps:.0f} eps of "
        f"{report.options.model.dtype}), {report.check_seconds:.1f} s{keys}{tokens_checked(report)}"
    )


def _figures(report: ReplayReport) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 1))
    grid.add_column(style="bold")
    grid.add_column()
    for name, text in figures(report):
        style = ("green" if report.passed else "bold red") if name == "check" else ""
        grid.add_row(name, Text(text, style=style))
    return grid


def write_json(report: ReplayReport, path: Path) -> None:
    """Write options, environment, every batch, and the summary."""
    content = {"summary": summarize(report), **dataclasses.asdict(report)}
    for record in (content["summary"], *content["batches"], content["decode"] or {}):
        for name in ("max_error", "error_over_codes"):
            if record.get(name) == math.inf:  # JSON has no infinity
                record[name] = "inf"
    other = content["replicated"]
    if other and other["difference"] == math.inf:
        other["difference"] = "inf"
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
