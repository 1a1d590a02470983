# SPDX-License-Identifier: Apache-2.0
"""The output of `cpattn plan`: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._cli.rates import as_options
from .._cli.tables import Row, print_table
from . import assumptions
from .prediction import Prediction
from .rates import Rates
from .work import AttentionLayer

_COLUMNS = (
    "ranks",
    "strategy",
    "imbalance",
    "attention",
    "sent/rank",
    "gather",
    "store",
    "layer",
    "model",
    "speed-up",
    "efficiency",
)
_LESS_IMPORTANT = ("store", "efficiency", "sent/rank", "imbalance", "gather", "layer")
_LEGEND = {
    "imbalance": "imbalance: most query-key pairs of a rank / mean",
    "attention": "attention, gather: the slowest rank, in one layer",
    "sent/rank": "sent/rank: most bytes of keys and values one rank sends for a layer",
    "store": "store: the new ones into the pool",
    "speed-up": "speed-up: over one rank",
    "efficiency": "efficiency: speed-up / ranks",
}


def print_plan(predictions: Sequence[Prediction], rates: Rates, sources: dict[str, str]) -> None:
    """The table on stdout, with what it rests on below; `sources` says where each rate is from."""
    first = predictions[0]
    shape = first.layer
    several = any(prediction.strategy != first.strategy for prediction in predictions)
    console, header = print_table(
        f"{_count(first.num_batches, 'batch')}, {first.new_tokens:,} new tokens; "
        f"{shape.num_heads}/{shape.num_kv_heads} heads × {shape.head_dim}, {shape.dtype}, "
        f"{shape.num_layers} layers{_kind(shape)}",
        _COLUMNS,
        [
            Row(_cells(p), ends_section=several and p.strategy == predictions[-1].strategy)
            for p in predictions
        ],
        less_important=_LESS_IMPORTANT,
        left=("strategy",),
    )
    legend = "; ".join(text for name, text in _LEGEND.items() if name in header)
    console.print(
        f"\n{legend}. Attention and its keys and values alone, no MLP.\n", highlight=False
    )
    for source in dict.fromkeys(sources.values()):
        values = {name: getattr(rates, name) for name in sources if sources[name] == source}
        console.print(f"{source}: {as_options(values)}", highlight=False, soft_wrap=True)
    assumed = [name for name, source in sources.items() if source == "assumed"]
    if text := assumptions.describe(shape.dtype, assumed):
        console.print(text, highlight=False)
    size = _bytes(first.pool_bytes)
    console.print(f"KV pool: {size} on every rank, for the largest batch", highlight=False)


def write_json(
    path: Path, predictions: Sequence[Prediction], rates: Rates, sources: dict[str, str]
) -> None:
    """Everything predicted, with the values of each rank, and the rates."""
    report = {
        "rates": dataclasses.asdict(rates),
        "sources": sources,
        "predictions": [_record(prediction) for prediction in predictions],
    }
    path.write_text(json.dumps(report, default=_plain) + "\n", encoding="utf-8")


def _record(prediction: Prediction) -> dict[str, Any]:
    derived = ("layer_seconds", "model_seconds", "speedup", "efficiency", "attention_share")
    return dataclasses.asdict(prediction) | {name: getattr(prediction, name) for name in derived}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"not JSON: {value!r}")


def _cells(prediction: Prediction) -> list[str]:
    return [
        str(prediction.cp_size),
        prediction.strategy,
        f"{prediction.imbalance:.3f}",
        _time(prediction.slowest_attention_seconds),
        _bytes(int(prediction.sent_bytes.max())),
        _time(prediction.slowest_gather_seconds),
        _time(prediction.store_seconds),
        _time(prediction.layer_seconds),
        _time(prediction.model_seconds),
        f"{prediction.speedup:.1f} x",
        f"{prediction.efficiency:.1%}",
    ]


def _kind(layer: AttentionLayer) -> str:
    window = "" if layer.window is None else f", window {layer.window:,}"
    return f"{window}{', latents' if layer.latent else ''}"


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
    """Three digits, and all of larger numbers: never 1e+03."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}es"
