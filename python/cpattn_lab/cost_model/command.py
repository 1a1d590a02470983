# SPDX-License-Identifier: Apache-2.0
"""Options of `cpattn plan` converted to numbers of ranks, batches, a layer and rates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

from cpattn import _core
from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import prefill_batches
from cpattn_terminal.limits import MAX_RANKS, check_batch

from ..traffic.trace import TRACE_BLOCK_TOKENS, read_trace
from . import assumptions
from .calibration import calibrate, num_steps
from .decode import DecodePrediction, predict_decode
from .layer import AttentionLayer
from .prediction import Batch, Prediction, predict
from .rates import Rates

_MAX_THREADS = 256  # most threads to measure, or the number of CPUs if larger
_TOKENS, _REQUESTS = 32768, 64
_STRATEGIES = ("zigzag", "interleave", "contiguous")

Progress = Callable[[int, "int | None", str], None]


def forecasts(
    *,
    cp_size: list[int],
    strategy: str,
    calibrate: bool,
    decode: int | None = None,
    hosts: list[int] | None = None,
    ranks_per_host: int | None = None,
    mesh: tuple[int, int] | None = None,
    placement: str | None = None,
    exchange: str | None = None,
    overlap: str | None = None,
    state_dtype: str | None = None,
    out_heads: str | None = None,
    cpus: int | None = None,
    progress: Progress = lambda done, total, what: None,
    **options: Any,
) -> tuple[list[Prediction] | list[DecodePrediction], Rates, dict[str, str]]:
    """Return a prediction for every number of ranks and strategy, the rates, and their sources.

    With `decode`, predict a step of so many sequences; strategies then have no effect.
    """
    layer = AttentionLayer(
        **{field.name: options.pop(field.name) for field in fields(AttentionLayer)}
    )
    given = {field.name: options.pop(field.name) for field in fields(Rates)}
    if ranks_per_host and not hosts:
        raise ValueError("--ranks-per-host needs --hosts, their number")
    sizes = [count * (ranks_per_host or 1) for count in hosts] if hosts else cp_size
    if mesh:
        sizes = [mesh[0] * mesh[1]]
    if max(sizes) > MAX_RANKS:
        raise ValueError(
            f"--hosts times --ranks-per-host must be at most {MAX_RANKS} ranks, got {max(sizes)}"
        )
    placing: dict[str, Any] = {
        "placement": placement,
        "exchange": exchange,
        "overlap": overlap,
        "state_dtype": state_dtype,
        "ranks_per_host": ranks_per_host,
        "cpus": cpus,
        "mesh": mesh,
    }
    placing = {name: value for name, value in placing.items() if value is not None}
    if out_heads is not None:
        if not decode:
            raise ValueError("--out-heads is of a step of --decode")
        placing["out_heads"] = out_heads
    if decode and mesh:
        raise ValueError("--mesh is of new tokens of a prefill; --decode has none")
    if decode:
        lengths = _decoded(decode, placing, **options)
        rates, sources = _rates(layer, given, measure=calibrate, progress=progress)
        steps = [predict_decode(lengths, layer, rates, cp_size=size, **placing) for size in sizes]
        return steps, rates, sources
    batches = _batches(layer, **options)
    rates, sources = _rates(layer, given, measure=calibrate, progress=progress)
    strategies = _STRATEGIES if strategy == "all" else (strategy,)
    asked = [(size, name) for size in sizes for name in strategies]
    predictions = []
    for i, (size, name) in enumerate(asked):
        progress(i, len(asked), f"{name} over {size} ranks")
        predictions.append(predict(batches, layer, rates, cp_size=size, strategy=name, **placing))
    return predictions, rates, sources


def _decoded(
    num_sequences: int,
    placing: dict[str, Any],
    *,
    prefix: int | None,
    prefix_lens: list[int] | None,
    **others: Any,
) -> list[int]:
    """Return lengths of decoding sequences, each with its new token."""
    if "overlap" in placing:
        raise ValueError("--overlap is of new tokens of a prefill; --decode has none")
    if any(value is not None for value in others.values()):
        raise ValueError(
            "--decode has one new token of each sequence: it takes --prefix or --prefix-lens alone,"
            " and --decode recorded --capture"
        )
    if (prefix is None) == (prefix_lens is None):
        raise ValueError("--decode needs one of --prefix, of all sequences, and --prefix-lens")
    lengths = [prefix or 0] * num_sequences if prefix_lens is None else prefix_lens
    check_batch("--decode", [1] * num_sequences, "--prefix-lens", lengths)
    return [cached + 1 for cached in lengths]


def _rates(
    layer: AttentionLayer, given: dict[str, Any], *, measure: bool, progress: Progress
) -> tuple[Rates, dict[str, str]]:
    """Return rates, measured only on demand, so that answers do not depend on the machine."""
    given = {name: value for name, value in given.items() if value is not None}
    if measure:
        threads = given.get("threads") or _core.default_num_threads()
        _check_measurable(threads)
        step, steps = count(), num_steps(threads)
        here = vars(
            calibrate(
                layer, threads=threads, progress=lambda what: progress(next(step), steps, what)
            )
        )
    else:
        threads = given.get("threads") or assumptions.THREADS
        here = {
            "threads": threads,
            "gflops": threads * assumptions.THREAD_GFLOPS[layer.dtype],
            "store_gb_per_s": min(
                threads * assumptions.THREAD_STORE_GB_PER_S, assumptions.STORE_GB_PER_S
            ),
        }
    rates = Rates(**here | given)
    other = "measured" if measure else "assumed"
    return rates, {name: "given" if name in given else other for name in vars(rates)}


def _check_measurable(threads: int) -> None:
    most = max(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if threads > most:
        raise ValueError(
            f"--threads must be at most {most} to be measured (--calibrate), got {threads}"
        )


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
    recorded: list[Batch] | None = None,
) -> list[Batch]:
    ways = {
        "--tokens and --prefix": (tokens, prefix),
        "--extend-lens and --prefix-lens": (extend_lens, prefix_lens),
        "--trace": (trace,),
        "--capture": (recorded,),
    }
    if sum(any(value is not None for value in way) for way in ways.values()) > 1:
        raise ValueError(f"a batch comes from one of {', '.join(ways)}")
    if trace:
        requests = read_trace(trace, limit=num_requests or _REQUESTS)
        budget = token_budget or _TOKENS
        return trace_batches(requests, page_size=layer.page_size, token_budget=budget)
    if recorded:
        return recorded
    if num_requests or token_budget:
        raise ValueError("--requests and --token-budget are of a --trace, but there is none")
    if extend_lens is None and prefix_lens is None:
        extend_lens, prefix_lens = [tokens or _TOKENS], [prefix or 0]
        check_batch("--tokens", extend_lens, "--prefix", prefix_lens)
        return [(extend_lens, _added(prefix_lens, extend_lens))]
    if extend_lens is None:
        raise ValueError("--prefix-lens needs --extend-lens")
    prefix_lens = [0] * len(extend_lens) if prefix_lens is None else prefix_lens
    check_batch("--extend-lens", extend_lens, "--prefix-lens", prefix_lens)
    if not any(extend_lens):
        raise ValueError("--extend-lens must have a sequence with new tokens, got none")
    return [(extend_lens, _added(prefix_lens, extend_lens))]


def _added(prefix_lens: list[int], extend_lens: list[int]) -> list[int]:
    return [cached + new for cached, new in zip(prefix_lens, extend_lens, strict=True)]


def parse_cp_sizes(text: str) -> list[int]:
    """Parse ``8..1024`` (doubling), ``8,16,48``, or one number; ValueError for other text.

    >>> parse_cp_sizes("8..64"), parse_cp_sizes("3..7")
    ([8, 16, 32, 64], [3, 6, 7])
    """
    low, dots, high = text.partition("..")
    sizes = [int(part) for part in low.split(",")]
    if not dots:
        return sizes
    (size,), end = sizes, int(high)
    if not 1 <= size <= end:
        raise ValueError(f"{text!r} is not a range of numbers of ranks >= 1")
    while sizes[-1] < end:
        sizes.append(min(2 * sizes[-1], end))
    return sizes


def trace_batches(requests: Sequence[Request], *, page_size: int, token_budget: int) -> list[Batch]:
    """Return the prefill batches of a trace after a prefix cache without eviction."""
    pages = sum(-(-request.input_length // page_size) + 1 for request in requests)
    cache = PrefixCache(pages, page_size=page_size, block_tokens=TRACE_BLOCK_TOKENS)
    batches = prefill_batches(requests, cache, token_budget=token_budget)
    return [(batch.extend_lens, batch.seq_lens) for batch in batches]
