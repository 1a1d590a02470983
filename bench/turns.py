# SPDX-License-Identifier: Apache-2.0
"""Runs a comparison in this process, by the rules of race.py: checked first, sampled in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import race
from comparison import Comparison, Wrong, peak_of
from contender import Failed
from figures import Row


@dataclass(frozen=True)
class Local:
    """What race.py asks for samples: a function of this process instead of a child."""

    name: str
    function: Callable[[], Any]
    version: str = ""

    def ask(self, do: str, calls: int) -> Row:
        assert do == "sample"
        begin = time.perf_counter()
        for _ in range(calls):
            self.function()
        return {"stage": 0.0, "run": (time.perf_counter() - begin) / calls}


def run(comparison: Comparison, budget: float) -> list[Row]:
    """A row for each implementation, those that failed last, with the bars they have.

    `budget` is the seconds that a peer's samples may take; those of cpattn have four times as much.
    """
    rows, lanes = [], []
    for name, function in comparison.implementations.items():
        try:
            seconds = budget * (4 if name.startswith("cpattn") else 1)
            lanes.append(checked(Local(name, function), comparison, seconds))
        except Failed as failed:
            rows.append(failed.row(name))
    gc.collect()
    gc.disable()
    try:
        peaks = race.sample(lanes, peak_of(comparison))
    finally:
        gc.enable()
    timed = {lane.contender.name: measured(lane, peaks, comparison) for lane in lanes}
    for bar in comparison.bars:
        try:
            timed[bar.of].setdefault("bars", []).append(bar.judge(timed))
        except KeyError:  # somebody failed, whose row says so
            continue
    return [*timed.values(), *rows]


def checked(contender: Local, comparison: Comparison, budget: float) -> race.Lane:
    """The first call, whose result is checked. Failed if there is none, or a wrong one."""
    try:
        begin = time.perf_counter()
        result = contender.function()
        seconds = time.perf_counter() - begin
        error = comparison.check(contender.name, result)
    except Wrong as wrong:
        raise Failed("wrong", str(wrong)) from wrong
    except Failed:
        raise
    except Exception as error:  # a peer may fail in any way and takes nothing else along
        raise Failed("error", f"{type(error).__name__}: {error}") from error
    first = {"stage": 0.0, "run": seconds, "compiled": False, "extra_memory": 0, "note": ""}
    return race.Lane(contender, first, error, budget)


def measured(lane: race.Lane, peaks: list[float], comparison: Comparison) -> Row:
    row = race.measured(lane, peaks, comparison)
    for unused in ("staging", "extra_memory", "note", "version"):
        row.pop(unused)
    number, item = comparison.items
    row |= {"ns_per_item": 1e9 * row["median"] / number, "item": item}
    if not comparison.has_share:
        row.pop("peak")
        row.pop("percent_of_peak")
    return row
