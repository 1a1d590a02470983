# SPDX-License-Identifier: Apache-2.0
"""Contenders run in turns; who fails is a row, not the end of the run.

Every contender's result is checked before anything is timed. The peak of the machine is measured
around the samples, and samples whose neighbourhood fell short of the best are dropped.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch

import accuracy
import cpattn.reference
from contender import Contender, Failed, Row
from peers import inputs
from workloads import Case, Workload, starts

PAUSE = 0.01  # for the threads of the one before to stop spinning
SHORT = 0.05  # calls shorter than this are averaged within a sample
LONG = 4.0  # of longer calls the checked one is a sample, too
QUIET = 0.95  # of the best peak: a neighbour was at work below it
MIN_SAMPLES, MAX_SAMPLES, SPREAD = 3, 7, 0.03


@dataclass
class Lane:
    """The samples of one contender."""

    contender: Contender
    first: Row  # of the checked call
    error: float
    budget: float  # seconds
    samples: list[tuple[float, float, int]] = field(default_factory=list)  # stage, run, peak before
    spent: float = 0.0
    failed: Failed | None = None

    @property
    def calls(self) -> int:
        """Of the next sample."""
        if self.first["compiled"] and not self.samples:
            return 1
        stage, run = (
            self.samples[-1][:2] if self.samples else (self.first["stage"], self.first["run"])
        )
        return max(1, min(1000, int(SHORT / (stage + run))))

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


def race(
    case: Case, contenders: Mapping[str, Contender], peak: Callable[[], float], budget: float
) -> list[Row]:
    """The rows of a case: who runs it, checked, and sampled in turns with the others.

    `budget` is the seconds that a peer's samples may take; cpattn, the first, has four times as
    much. The peak is in units of work per second.
    """
    rows, lanes = [], []
    with data(case.workload) as folder:
        expected = None
        for module, contender in contenders.items():
            if module != "ours" and (not case.peers or module == case.without):
                continue
            try:
                first, result = prepared(contender, case.workload, folder)
                error = check(result, expected, case.workload, folder)
            except Failed as failed:
                rows.append(failed.row(contender.name))
                continue
            if expected is None:
                expected = result.clone()
            lanes.append(Lane(contender, first, error, budget * (1 if lanes else 4)))
    peaks = sample(lanes, peak)
    return [measured(lane, peaks, case.workload) for lane in lanes] + rows


@contextlib.contextmanager
def data(work: Workload) -> Iterator[Path]:
    """A folder, in memory where possible, with the tensors of a workload."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        inputs.make(work, Path(name))
        yield Path(name)


def prepared(contender: Contender, work: Workload, folder: Path) -> tuple[Row, torch.Tensor]:
    out = folder / "out"
    out.unlink(missing_ok=True)
    first = contender.ask("prepare", work=asdict(work), folder=str(folder), out=str(out))
    return first, inputs.output(work, out)


def check(
    result: torch.Tensor, expected: torch.Tensor | None, work: Workload, folder: Path
) -> float:
    """The largest relative error of a token's output; Failed if no rounding explains it.

    cpattn, which comes first, is compared with the float64 oracle on some tokens of each sequence;
    the others with cpattn on all tokens. Each rounds its probabilities and its output, once.
    """
    if expected is None:
        rows, expected = oracle(inputs.load(work, folder))
        result = result[rows]
    expected = expected.float().flatten(1)
    difference = result.float().flatten(1) - expected
    error = float((difference.norm(dim=1) / expected.norm(dim=1)).max())
    bound = accuracy.ATTENTION[work.dtype] * torch.finfo(getattr(torch, work.dtype)).eps
    if not error <= bound:
        raise Failed("wrong", f"relative error {error:.2g}")
    return error


def oracle(tensors: inputs.Inputs) -> tuple[list[int], torch.Tensor]:
    """Some rows of the queries and their exact outputs: each a sequence of one query."""
    work = tensors.work
    rows, kv_lens, tables = [], [], []
    sequences = range(0, len(work.new), -(-len(work.new) // 4))
    for i in sequences:
        begin, end = starts(work.new)[i]
        for row in sorted({begin, (begin + end) // 2, end - 1}):
            rows.append(row)
            kv_lens.append(work.prefix[i] + row - begin + 1)
            tables.append(tensors.block_tables[i])
    out, _ = cpattn.reference.paged_attention(
        tensors.q[rows],
        tensors.k_cache,
        tensors.v_cache,
        q_lens=[1] * len(rows),
        kv_lens=kv_lens,
        block_tables=torch.stack(tables),
        scale=work.scale,
        window=work.window,
    )
    return rows, torch.from_numpy(np.asarray(out))


def sample(lanes: list[Lane], peak: Callable[[], float]) -> list[float]:
    """Rounds of one sample each until all are finished. The peaks, in order of measurement."""
    peaks = [peak()]
    for lane in lanes:
        if not lane.first["compiled"] and lane.first["stage"] + lane.first["run"] >= LONG:
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


def measured(lane: Lane, peaks: list[float], work: Workload) -> Row:
    """A contender's row. If no sample was quiet, all count, and the row says so."""
    if lane.failed:
        return lane.failed.row(lane.contender.name)
    floor = QUIET * max(peaks)
    quiet = [s for s in lane.samples if min(peaks[s[2]], peaks[s[2] + 1]) >= floor]
    kept = quiet or lane.samples
    totals = [stage + run for stage, run, _ in kept]
    amount, unit = work.work
    peak = median(value for value in peaks if value >= floor)
    return {
        "implementation": lane.contender.name,
        "version": lane.contender.version,
        "status": "ok",
        "median": median(totals),
        "minimum": min(totals),
        "spread": spread(totals),
        "samples": len(kept),
        "dropped": len(lane.samples) - len(kept),
        "noisy": not quiet,
        "calls_per_sample": lane.calls,
        "staging": median(stage for stage, _, _ in kept),
        "rate": amount / median(totals),
        "unit": unit,
        "peak": peak / 1e9,
        "percent_of_peak": 100e9 * amount / median(totals) / peak,
        "error": lane.error,
        "extra_memory": lane.first["extra_memory"],
        "note": lane.first["note"],
    }


def spread(values: list[float]) -> float:
    """The width of the middle half."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return high - low
