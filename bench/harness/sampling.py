# SPDX-License-Identifier: Apache-2.0
"""Samples in turns, beside measurements of the machine's peak, and their statistics.

The peak is measured around the samples, and samples whose neighbourhood fell short of the best are
dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Protocol

from bench.harness.contender import Failed
from bench.harness.figures import Row

PAUSE = 0.01  # for the threads of the one before to stop spinning
SHORT = 0.05  # calls shorter than this are averaged within a sample
LONG = 4.0  # of longer calls the checked one is a sample, too
QUIET = 0.95  # of the best peak: a neighbour was at work below it
MIN_SAMPLES, MAX_SAMPLES, SPREAD = 3, 7, 0.03
OURS = 4  # times as many seconds of samples as a peer


class Sampled(Protocol):
    """An implementation, in any process."""

    @property
    def name(self) -> str: ...

    def ask(self, do: str, *, calls: int) -> Row:
        """Mean seconds of some calls, to "stage" and to "run"; Failed if there are none."""


@dataclass
class Lane:
    """The samples of one implementation."""

    contender: Sampled
    first: Row  # of the checked call
    error: float
    budget: float  # seconds
    samples: list[tuple[float, float, int]] = field(default_factory=list)  # stage, run, peak before
    spent: float = 0.0
    short: float = SHORT  # calls shorter than this are averaged within a sample
    long: float = LONG  # of longer calls the checked one is a sample, too
    failed: Failed | None = None

    @property
    def calls(self) -> int:
        """The number of calls of the next sample."""
        if self.first["compiled"] and not self.samples:
            return 1
        stage, run = (
            self.samples[-1][:2] if self.samples else (self.first["stage"], self.first["run"])
        )
        return max(1, min(1000, int(self.short / (stage + run))))

    @property
    def finished(self) -> bool:
        totals = [stage + run for stage, run, _ in self.samples]
        if self.failed or (totals and self.spent >= self.budget):
            return True
        enough = len(totals) >= MIN_SAMPLES and spread(totals) <= SPREAD * median(totals)
        return enough or len(totals) >= MAX_SAMPLES

    def add(self, answer: Row, peak_index: int, calls: int) -> None:
        self.samples.append((answer["stage"], answer["run"], peak_index))
        self.spent += calls * (answer["stage"] + answer["run"])


def sample(lanes: list[Lane], peak: Callable[[], float]) -> list[float]:
    """Take rounds of one sample each until all are finished; return the peaks in order."""
    peaks = [peak()]
    for lane in lanes:
        if not lane.first["compiled"] and lane.first["stage"] + lane.first["run"] >= lane.long:
            lane.add(lane.first, 0, 1)
    while unfinished := [lane for lane in lanes if not lane.finished]:
        for lane in unfinished:
            time.sleep(PAUSE)
            calls = lane.calls
            try:
                answer = lane.contender.ask("sample", calls=calls)
            except Failed as failed:
                lane.failed = failed
                continue
            lane.add(answer, len(peaks) - 1, calls)
            if lane is lanes[0]:
                peaks.append(peak())
        peaks.append(peak())
    return [*peaks, peaks[-1]]


def measured(lane: Lane, peaks: list[float], work: tuple[float, str] | None) -> Row:
    """The row of an implementation. If no sample was quiet, all count, and the row says so.

    `work` is the work of a call, in units of 10^9 like the peaks; None if it is meaningless.
    """
    if lane.failed:
        return lane.failed.row(lane.contender.name)
    floor = QUIET * max(peaks)
    quiet = [s for s in lane.samples if min(peaks[s[2]], peaks[s[2] + 1]) >= floor]
    kept = quiet or lane.samples
    totals = [stage + run for stage, run, _ in kept]
    row: Row = {
        "implementation": lane.contender.name,
        "status": "ok",
        "median": median(totals),
        "minimum": min(totals),
        "spread": spread(totals),
        "samples": len(kept),
        "dropped": len(lane.samples) - len(kept),
        "noisy": not quiet,
        "calls_per_sample": lane.calls,
        "staging": median(stage for stage, _, _ in kept),
        "error": lane.error,
    }
    if work is not None:
        amount, unit = work
        peak = median(value for value in peaks if value >= floor)
        row |= {
            "rate": amount / median(totals),
            "unit": unit,
            "peak": peak / 1e9,
            "percent_of_peak": 100e9 * amount / median(totals) / peak,
        }
    return row


def spread(values: list[float]) -> float:
    """The width of the middle half."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return high - low
