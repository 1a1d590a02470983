# SPDX-License-Identifier: Apache-2.0
"""What `cpattn plan` is asked: its options as numbers of ranks, batches, a layer and rates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import _core
from ..replay.prefix_cache import PrefixCache
from ..replay.scheduler import prefill_batches
from ..replay.trace import TRACE_BLOCK_TOKENS, Request, read_trace
from .calibration import assumed_gflops, calibrate
from .prediction import Batch, Prediction, Rates, predict
from .work import AttentionLayer

_TOKENS, _REQUESTS = 32768, 64
_STRATEGIES = ("zigzag", "interleave", "contiguous")


def forecasts(
    *, cp_size: list[int], strategy: str, calibrate: bool, **options: Any
) -> tuple[list[Prediction], Rates, dict[str, str]]:
    """A prediction for every number of ranks and strategy, the rates, and where each is from."""
    layer = AttentionLayer(
        **{field.name: options.pop(field.name) for field in fields(AttentionLayer)}
    )
    given = {field.name: options.pop(field.name) for field in fields(Rates)}
    batches = _batches(layer, **options)
    rates, sources = _rates(layer, given, measure=calibrate)
    strategies = _STRATEGIES if strategy == "all" else (strategy,)
    predictions = [
        predict(batches, layer, rates, cp_size=size, strategy=name)
        for size in cp_size
        for name in strategies
    ]
    return predictions, rates, sources


def _rates(
    layer: AttentionLayer, given: dict[str, Any], *, measure: bool
) -> tuple[Rates, dict[str, str]]:
    given = {name: value for name, value in given.items() if value is not None}
    threads = given.get("threads") or _core.default_num_threads()
    here: dict[str, Any] = {"threads": threads}
    if measure:
        here = vars(calibrate(layer, threads=threads, progress=_tell))
    elif "gflops" not in given:
        here["gflops"] = assumed_gflops(layer, threads)
    rates = Rates(**here | given)
    other = "measured" if measure else "assumed"
    return rates, {name: "given" if name in given else other for name in vars(rates)}


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        print(f"measuring: {what}", file=sys.stderr)


def _batches(
    layer: AttentionLayer,
    *,
    tokens: int | None,
    prefix: int | None,
    extend_lens: list[int] | None,
    prefix_lens: list[int] | None,
    trace: Path | None,
    num_requests: int | None,
    token_budget: int | None,
) -> list[Batch]:
    ways = {
        "--tokens and --prefix": tokens or prefix,
        "--extend-lens and --prefix-lens": extend_lens or prefix_lens,
        "--trace": trace,
    }
    if sum(value is not None for value in ways.values()) > 1:
        raise ValueError(f"a batch comes from one of {', '.join(ways)}")
    if trace:
        requests = read_trace(trace, limit=num_requests or _REQUESTS)
        budget = token_budget or _TOKENS
        return trace_batches(requests, page_size=layer.page_size, token_budget=budget)
    if num_requests or token_budget:
        raise ValueError("--requests and --token-budget are of a --trace, but there is none")
    if extend_lens or prefix_lens:
        lens = extend_lens or []
        return [(lens, prefix_lens or [0] * len(lens))]
    return [([tokens or _TOKENS], [prefix or 0])]


def parse_cp_sizes(text: str) -> list[int]:
    """``8..1024`` (doubling), ``8,16,48``, or one number.

    >>> parse_cp_sizes("8..64"), parse_cp_sizes("3..7")
    ([8, 16, 32, 64], [3, 6, 7])
    """
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split(".."))
            sizes = [low] if low > 0 else []
            while sizes and sizes[-1] < high:
                sizes.append(min(2 * sizes[-1], high))
            valid = 1 <= low <= high
        else:
            sizes = [int(part) for part in text.split(",")]
            valid = min(sizes) >= 1
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            f"{text!r} is no number of ranks >= 1, list like 8,16,48 or range like 8..1024"
        )
    return sizes


def trace_batches(requests: Sequence[Request], *, page_size: int, token_budget: int) -> list[Batch]:
    """The prefill batches of a trace, behind a prefix cache that forgets nothing."""
    pages = sum(-(-request.input_length // page_size) + 1 for request in requests)
    cache = PrefixCache(pages, page_size=page_size, block_tokens=TRACE_BLOCK_TOKENS)
    batches = prefill_batches(requests, cache, token_budget=token_budget)
    return [(batch.extend_lens, batch.prefix_lens) for batch in batches]
