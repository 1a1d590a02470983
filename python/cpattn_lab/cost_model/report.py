# SPDX-License-Identifier: Apache-2.0
"""Output of `cpattn plan`: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cpattn_terminal.tables import Row, print_table

from ..rate_options import as_options
from . import assumptions
from .decode import DecodePrediction
from .layer import AttentionLayer
from .prediction import Prediction
from .rates import Rates

#: Columns of every table of a prefill: name, and function of the cell.
_COLUMNS: dict[str, Callable[[Prediction], str]] = {
    "ranks": lambda p: str(p.cp_size),
    "strategy": lambda p: p.strategy,
    "imbalance": lambda p: f"{p.imbalance:.3f}",
    "attention": lambda p: _time(p.slowest_attention_seconds),
    "sent/rank": lambda p: _bytes(int(p.sent_bytes.max())),
    "gather": lambda p: _time(p.slowest_gather_seconds),
    "store": lambda p: _time(p.store_seconds),
    "layer": lambda p: _time(p.layer_seconds),
    "model": lambda p: _time(p.model_seconds),
    "speed-up": lambda p: f"{p.speedup:.1f} x",
    "efficiency": lambda p: f"{p.efficiency:.1%}",
}
#: Columns for sharded pools or an exchange other than gathering into every pool.
_PLACED: dict[str, Callable[[Prediction], str]] = {
    "ranks": _COLUMNS["ranks"],
    "hosts": lambda p: str(p.num_hosts),
    "strategy": _COLUMNS["strategy"],
    "exchange": lambda p: p.exchange,
    "imbalance": _COLUMNS["imbalance"],
    "attention": _COLUMNS["attention"],
    "sent/rank": _COLUMNS["sent/rank"],
    "transfer": _COLUMNS["gather"],
    "store": _COLUMNS["store"],
    "hidden": lambda p: _time(p.hidden_seconds),
    "layer": _COLUMNS["layer"],
    "model": _COLUMNS["model"],
    "speed-up": _COLUMNS["speed-up"],
    "efficiency": _COLUMNS["efficiency"],
    "pool/rank": lambda p: _bytes(p.pool_bytes),
    "scratch": lambda p: _bytes(p.scratch_bytes),
}
_STEPS: dict[str, Callable[[DecodePrediction], str]] = {
    "ranks": lambda p: str(p.cp_size),
    "hosts": lambda p: str(p.cp_size // p.ranks_per_host),
    "exchange": lambda p: p.exchange,
    "keys": lambda p: f"{int(p.keys.max()):,}",
    "imbalance": lambda p: f"{p.imbalance:.3f}",
    "attention": lambda p: _time(float(p.attention_seconds.max())),
    "sent/rank": lambda p: _bytes(int(p.sent_bytes.max())),
    "transfer": lambda p: _time(float(p.exchange_seconds.max())),
    "layer": lambda p: _time(p.layer_seconds),
    "model": lambda p: _time(p.model_seconds),
    "tokens/s": lambda p: f"{p.tokens_per_second:,.0f}",
    "speed-up": lambda p: f"{p.speedup:.1f} x",
    "pool/rank": lambda p: _bytes(p.pool_bytes),
}
_LESS_IMPORTANT = (
    *("store", "efficiency", "scratch", "sent/rank", "hosts", "imbalance", "gather", "hidden"),
    *("transfer", "layer", "keys", "pool/rank"),
)
_LEGEND = {
    "imbalance": "imbalance: most query-key pairs of a rank / mean",
    "attention": "attention, gather: the slowest rank, in one layer",
    "sent/rank": "sent/rank: most bytes of keys and values one rank sends for a layer",
    "store": "store: the new ones into the pool",
    "speed-up": "speed-up: over one rank",
    "efficiency": "efficiency: speed-up / ranks",
}
_PLACED_LEGEND = _LEGEND | {
    "attention": "attention, transfer: the slowest rank, in one layer",
    "sent/rank": "sent/rank: most bytes one rank sends to other hosts for a layer",
    "store": "store: into the pool, and into scratch",
    "hidden": "hidden: what overlaps of the transfer",
    "pool/rank": "pool/rank: pages of the largest batch, of the rank that keeps most",
    "scratch": "scratch: beside it, for one layer",
}
_STEP_LEGEND = {
    "keys": "keys: of all sequences, on the rank that keeps most",
    "imbalance": "imbalance: these / mean",
    "attention": _PLACED_LEGEND["attention"],
    "sent/rank": "sent/rank: most bytes of outputs and LSE one rank sends for a layer",
    "tokens/s": "model: a step",
    "speed-up": _LEGEND["speed-up"],
    "pool/rank": "pool/rank: pages of the rank that keeps most",
}


def print_plan(
    predictions: Sequence[Prediction] | Sequence[DecodePrediction],
    rates: Rates,
    sources: dict[str, str],
) -> None:
    """Print the table with its assumptions below; `sources` names the origin of each rate."""
    first = predictions[0]
    title, columns, legend = _layout(predictions)
    if all(prediction.ranks_per_host == 1 for prediction in predictions):
        columns.pop("hosts", None)
    last = getattr(predictions[-1], "strategy", None)
    several = any(getattr(prediction, "strategy", None) != last for prediction in predictions)
    console, header = print_table(
        title,
        list(columns),
        [
            Row(
                [cell(p) for cell in columns.values()],
                ends_section=several and getattr(p, "strategy", None) == last,
            )
            for p in predictions
        ],
        less_important=_LESS_IMPORTANT,
        left=("strategy", "exchange"),
    )
    text = "; ".join(text for name, text in legend.items() if name in header)
    console.print(f"\n{text}. Attention and its keys and values alone, no MLP.\n", highlight=False)
    for p in predictions:
        if isinstance(p, Prediction) and p.reason:
            seconds = sorted(p.alternatives.items(), key=lambda item: item[1])
            compared = ", ".join(f"{name} {_time(value)}" for name, value in seconds)
            where = f"{p.cp_size} ranks, {p.strategy}"
            console.print(f"auto, {where}: {p.reason} ({compared})", highlight=False)
    for source in dict.fromkeys(sources.values()):
        values = {name: getattr(rates, name) for name in sources if sources[name] == source}
        console.print(f"{source}: {as_options(values)}", highlight=False, soft_wrap=True)
    assumed = [name for name, source in sources.items() if source == "assumed"]
    if text := assumptions.describe(first.layer.dtype, assumed):
        console.print(text, highlight=False)
    if first.layer.bias_bytes:
        read = ", ".join(_bytes(int(p.bias_bytes.max())) for p in predictions)
        console.print(f"Bias: {read} read by a rank in a layer, at most", highlight=False)
    if "pool/rank" not in columns:
        size = _bytes(first.pool_bytes)
        console.print(f"KV pool: {size} on every rank, for the largest batch", highlight=False)


def _layout(
    predictions: Sequence[Prediction] | Sequence[DecodePrediction],
) -> tuple[str, dict[str, Callable[[Any], str]], dict[str, str]]:
    """Return the title, columns and legend of a table."""
    first = predictions[0]
    shape = first.layer
    model = (
        f"{shape.num_heads}/{shape.num_kv_heads} heads × {shape.head_dim}, {shape.dtype}, "
        f"{shape.num_layers} layers{_kind(shape)}"
    )
    if isinstance(first, DecodePrediction):
        where = f"{first.placement}{', all heads on every rank' * (first.out_heads == 'all')}"
        what = f"a step of {first.num_sequences:,} sequences, {where}; {model}"
        steps = dict(_STEPS)
        if all(p.exchange == "all_to_all" and not p.alternatives for p in predictions):
            steps.pop("exchange")
        return what, steps, _STEP_LEGEND
    title = f"{_count(first.num_batches, 'batch')}, {first.new_tokens:,} new tokens; {model}"
    placed = (first.placement, first.exchange, first.overlap, first.ranks_per_host, first.cpus)
    if placed == ("replicated", "gather", "none", 1, None) and not first.alternatives:
        return title, dict(_COLUMNS), _LEGEND
    columns = dict(_PLACED)
    if first.overlap == "none":
        columns.pop("hidden")
    placing = [f"keys {first.placement}"]
    if first.ranks_per_host > 1:
        placing.append(f"{first.ranks_per_host} ranks share the memory of a host")
    if first.mesh:
        placing.append(f"a mesh of {first.mesh[0]} x {first.mesh[1]} ranks")
    if first.cpus:
        placing.append(f"{first.cpus} CPUs a host")
    return f"{title}\n{', '.join(placing)}", columns, _PLACED_LEGEND


def write_json(
    path: Path,
    predictions: Sequence[Prediction] | Sequence[DecodePrediction],
    rates: Rates,
    sources: dict[str, str],
) -> None:
    """Write all predictions, with the values of each rank, and the rates."""
    report = {
        "rates": dataclasses.asdict(rates),
        "sources": sources,
        "predictions": [_record(prediction) for prediction in predictions],
    }
    path.write_text(json.dumps(report, default=_plain) + "\n", encoding="utf-8")


def _record(prediction: Prediction | DecodePrediction) -> dict[str, Any]:
    derived = ["layer_seconds", "model_seconds", "speedup"]
    if isinstance(prediction, DecodePrediction):
        derived.append("tokens_per_second")
    else:
        derived += ["efficiency", "attention_share"]
    return dataclasses.asdict(prediction) | {name: getattr(prediction, name) for name in derived}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"not JSON: {value!r}")


def _kind(layer: AttentionLayer) -> str:
    sides = layer.window if isinstance(layer.window, tuple) else (layer.window,)
    shown = " and ".join("all" if side is None else f"{side:,}" for side in sides)
    window = "" if layer.window is None else f", window {shown}"
    bias = "" if layer.bias is None else f", bias {layer.bias}"
    return f"{window}{', latents' if layer.latent else ''}{bias}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{_short(1e3 * seconds)} ms" if seconds >= 1e-3 else f"{_short(1e6 * seconds)} µs"


def _bytes(number: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{_short(number / unit)} {name}"
    return f"{number / 1024:.1f} KiB"


def _short(value: float) -> str:
    """Format three digits, or all digits of larger numbers: never 1e+03."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}es"
