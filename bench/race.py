# SPDX-License-Identifier: Apache-2.0
"""Contenders in child processes, run in turns: who crashes is a row, not the end of the run.

Every contender's result is checked before anything is timed. The peak of the machine is measured
around the samples, and samples whose neighbourhood fell short of the best are dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

import cpattn.reference
from peers import NAMES, inputs
from workloads import Case, Workload, starts

BENCH = Path(__file__).parent
ANSWER_SECONDS = 180.0
PAUSE = 0.01  # for the threads of the one before to stop spinning
SHORT = 0.01  # calls shorter than this are averaged within a sample
LONG = 2.0  # of longer calls the checked one is a sample, too
QUIET = 0.95  # of the best peak: a neighbour was at work below it
MIN_SAMPLES, MAX_SAMPLES, SPREAD = 3, 9, 0.02
Row = dict[str, Any]


class Failed(Exception):
    """Why a contender has no time: a status and a reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Contender:
    """A child process with one implementation on a number of threads, started when first asked."""

    def __init__(self, module: str, python: str, num_threads: int) -> None:
        self.name = NAMES[module]
        self._command = [python, "-m", "peers.worker", module, str(num_threads)]
        path = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": str(num_threads),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._missing = ""

    def start(self) -> None:
        """Begin to start, without waiting for it."""
        if self._process is None and not self._missing:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
            self._ready = False

    def ask(self, do: str, **arguments: Any) -> Row:
        """The answer to a command. Failed if there is none; the next one starts a new process."""
        self.start()
        if self._missing:
            raise Failed("not installed", self._missing)
        if not self._ready:
            self._answer()
            self._ready = True
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None

    def _answer(self) -> Row:
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        line = self._process.stdout.readline() if ready else b""
        answer = json.loads(line) if line else {}
        if not ready:
            self.stop()
            raise Failed("timeout", f"no answer within {ANSWER_SECONDS:.0f} s")
        if not line:
            raise self._crash()
        if "missing" in answer:
            self._missing = answer["missing"]
            self.stop()
            raise Failed("not installed", self._missing)
        for status in ("unsupported", "error"):
            if status in answer:
                raise Failed(status, answer[status])
        return answer

    def _crash(self) -> Failed:
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        self.stop()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failed("crashed", ": ".join([how, *said]))


@dataclass
class Lane:
    """The samples of one contender."""

    contender: Contender
    first: Row  # of the checked call
    error: float
    budget: float  # seconds
    samples: list[tuple[float, float, int]] = field(default_factory=list)  # stage, run, peak before
    spent: float = 0.0

    @property
    def calls(self) -> int:
        if self.first["compiled"]:
            return 1
        once = self.first["stage"] + self.first["run"]
        return max(1, min(1000, int(SHORT / once)))

    @property
    def finished(self) -> bool:
        totals = [stage + run for stage, run, _ in self.samples]
        if totals and self.spent >= self.budget:
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

    `budget` is the seconds that a peer's samples may take; cpattn, the first, has three times as
    much. The peak is in units of work per second.
    """
    rows, lanes = [], []
    with data(case.workload) as folder:
        expected = None
        for module, contender in contenders.items():
            if module != "ours" and not case.peers:
                continue
            try:
                first, result = prepared(contender, case.workload, folder)
                error = check(result, expected, case.workload, folder)
            except Failed as failed:
                rows.append({"implementation": contender.name, "status": failed.status,
                             "reason": failed.reason})  # fmt: skip
                continue
            if expected is None:
                expected = result.clone()
            lanes.append(Lane(contender, first, error, budget * (1 if lanes else 3)))
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
    difference = (result.double() - expected.double()).flatten(1).norm(dim=1)
    error = float((difference / expected.double().flatten(1).norm(dim=1)).max())
    bound = (64 if work.dtype == "float32" else 4) * torch.finfo(getattr(torch, work.dtype)).eps
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
            try:
                answer = lane.contender.ask("sample", calls=lane.calls)
            except Failed as failed:
                lane.first |= {"status": failed.status, "reason": failed.reason}
                lane.budget = 0.0
                lane.samples = lane.samples or [(np.nan, np.nan, len(peaks) - 1)]
                continue
            lane.add(answer, len(peaks) - 1, lane.calls)
            if lane is lanes[0]:
                peaks.append(peak())
        peaks.append(peak())
    return [*peaks, peaks[-1]]


def measured(lane: Lane, peaks: list[float], work: Workload) -> Row:
    """A contender's row. If no sample was quiet, all count, and the row says so."""
    best = max(peaks)
    quiet = [s for s in lane.samples if min(peaks[s[2]], peaks[s[2] + 1]) >= QUIET * best]
    kept = quiet or lane.samples
    totals = [stage + run for stage, run, _ in kept]
    amount, unit = work.work
    row = {
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
        "rate": amount / median(totals),
        "unit": unit,
        "peak": best / 1e9,
        "percent_of_peak": 100e9 * amount / median(totals) / best,
        "error": lane.error,
        "extra_memory": lane.first["extra_memory"],
        "note": lane.first["note"],
    }
    return row | {key: lane.first[key] for key in ("status", "reason") if key in lane.first}


def spread(values: list[float]) -> float:
    """The width of the middle half."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return high - low


def contenders(modules: list[str], num_threads: int, python: str) -> dict[str, Contender]:
    """cpattn in this interpreter, the peers in theirs; all begin to start at once."""
    made = {
        module: Contender(module, sys.executable if module == "ours" else python, num_threads)
        for module in modules
    }
    for contender in made.values():
        contender.start()
    return made
