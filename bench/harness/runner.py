# SPDX-License-Identifier: Apache-2.0
"""Runs a comparison in this process: all results checked first, then samples in turns."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.harness import sampling
from bench.harness.comparison import Comparison, Wrong, peak_of
from bench.harness.contender import Failed
from bench.harness.figures import Row, is_ours
from bench.harness.sampling import OURS, Lane


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Turn any failure of a peer into Failed, so that it affects nothing else."""
    try:
        yield
    except Failed:
        raise
    except Wrong as wrong:
        raise Failed("wrong", str(wrong)) from wrong
    except Exception as error:
        raise Failed("error", f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Local:
    """A function of this process; other contenders are child processes."""

    name: str
    function: Callable[[], Any]

    def ask(self, do: str, *, calls: int) -> Row:
        assert do == "sample"
        with failures():
            begin = time.perf_counter()
            for _ in range(calls):
                self.function()
            return {"stage": 0.0, "run": (time.perf_counter() - begin) / calls}


def run(comparison: Comparison, budget: float) -> list[Row]:
    """A row for each implementation with its bars, failed ones last.

    A peer's samples may take `budget` seconds, those of cpattn more.
    """
    rows: list[Row] = []
    lanes: list[Lane] = []
    for name, function in comparison.implementations.items():
        try:
            seconds = budget * (OURS if is_ours({"implementation": name}) else 1)
            lanes.append(checked(Local(name, function), comparison, seconds))
        except Failed as failed:
            rows.append(failed.row(name))
    gc.collect()
    gc.disable()
    try:
        peaks = sampling.sample(lanes, peak_of(comparison))
    finally:
        gc.enable()
    timed = {lane.contender.name: measured(lane, peaks, comparison) for lane in lanes}
    for bar in comparison.bars:
        try:
            judged = bar.judge(timed)
        except KeyError:  # somebody failed, whose row says so
            continue
        timed[bar.of].setdefault("bars", []).append(judged)
    return [*timed.values(), *rows]


def checked(contender: Local, comparison: Comparison, budget: float) -> Lane:
    """The first call, whose result is checked. Failed if it has no result or a wrong one."""
    with failures():
        begin = time.perf_counter()
        result = contender.function()
        seconds = time.perf_counter() - begin
        error = comparison.check(contender.name, result)
    first = {"stage": 0.0, "run": seconds, "compiled": False}
    return Lane(contender, first, error, budget)


def measured(lane: Lane, peaks: list[float], comparison: Comparison) -> Row:
    row = sampling.measured(lane, peaks, comparison.work)
    if lane.failed:
        return row
    row.pop("staging")  # there is none
    number, item = comparison.items
    row |= {"ns_per_item": 1e9 * row["median"] / number, "item": item}
    if not comparison.has_share:
        row.pop("peak", None)
        row.pop("percent_of_peak", None)
    return row
