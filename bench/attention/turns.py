# SPDX-License-Identifier: Apache-2.0
"""Contenders that take turns at several workloads, beside both limits of the machine."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import cpattn.reference
from bench.attention.peers import inputs
from bench.attention.race import contender
from bench.attention.workloads import Workload, starts
from bench.harness import accuracy, sampling
from bench.harness.comparison import Bar
from bench.harness.contender import Contender, Failed
from bench.harness.figures import Row
from bench.harness.sampling import OURS, Lane
from bench.harness.worker import ROOT
from cpattn import _core

PEER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True)
class Entrant:
    """A contender at one workload, whose tensors are in a folder."""

    name: str
    module: str
    contender: Contender
    work: Workload
    folder: Path
    which: str = ""  # of the workloads that the contender holds, if there are several

    def prepare(self) -> tuple[Row, torch.Tensor]:
        """The report and the result of its first call."""
        out = self.folder / "out"
        out.unlink(missing_ok=True)
        asked = {"work": asdict(self.work), "folder": str(self.folder), "which": self.which}
        first = self.contender.ask("prepare", out=str(out), **asked)
        return first | {"version": self.contender.version}, inputs.output(self.work, out).clone()

    def ask(self, do: str, *, calls: int) -> Row:
        return self.contender.ask(do, calls=calls, which=self.which)


@dataclass
class Roofline:
    """Products and bytes a second, measured at each call."""

    num_threads: int
    points: list[tuple[float, float]] = field(default_factory=list)  # flop/s, bytes/s
    fresh: float = 0.5  # seconds for which a measurement is not made again
    _measured: float = 0.0

    def __call__(self) -> float:
        if not self.points or time.monotonic() - self._measured > self.fresh:
            peak = _core.measure_peak("bfloat16", self.num_threads)
            self.points.append((peak, _core.measure_read_bandwidth(self.num_threads)))
        else:
            self.points.append(self.points[-1])
        self._measured = time.monotonic()
        return min(self.points[-1])

    def flops(self, intensity: float) -> list[float]:
        """The attainable flop/s of work with this many flop for each byte, at each measurement."""
        limits = [min(peak, bandwidth * intensity) for peak, bandwidth in self.points]
        return [*limits, limits[-1]]  # as `sampling.sample` has its peaks

    def bytes(self) -> list[float]:
        limits = [bandwidth for _, bandwidth in self.points]
        return [*limits, limits[-1]]


def peer_contenders(modules: Sequence[str], num_threads: int, quick: bool) -> dict[str, Contender]:
    """cpattn in this interpreter, the peers in theirs; all start at once."""
    made = {}
    for module in modules:
        theirs = module.split(":")[0] != "ours" and PEER_PYTHON.exists() and not quick
        python = str(PEER_PYTHON) if theirs else sys.executable
        made[module] = contender(module.split(":")[0], num_threads, python)
    for one in made.values():
        one.start()
    return made


@dataclass
class Turns:
    """The results of entrants that took turns."""

    lanes: list[tuple[Entrant, Lane]]
    failed: list[tuple[Entrant, Row]]
    roofline: Roofline

    def rows(
        self, common: Row, bars: Sequence[Bar], which: str | None = None, by_bytes: bool = False
    ) -> list[Row]:
        """The rows of a case, with the bars that can be judged: of all, or of one workload."""
        timed = {
            entrant.name: timed_row(entrant, lane, self.roofline, by_bytes)
            for entrant, lane in self.lanes
            if which in (None, entrant.which)
        }
        failed = [row for entrant, row in self.failed if which in (None, entrant.which)]
        ran = {name: row for name, row in timed.items() if row["status"] == "ok"}
        for bar in bars:
            try:
                judged = bar.judge(ran)
            except KeyError:  # somebody failed, whose row says so
                continue
            timed[bar.of].setdefault("bars", []).append(judged)
        return [common | row for row in (*timed.values(), *failed)]


def take_turns(
    entrants: Sequence[Entrant],
    num_threads: int,
    budget: float,
    *,
    short: float = sampling.SHORT,
    long: float = sampling.LONG,
    patience: float = math.inf,
) -> Turns:
    """All entrants with a right result, timed in turns.

    cpattn, at any place, is compared with the oracle on some rows; the others with the preceding
    result of cpattn on the same tensors, or with the oracle if there is none. A peer that took
    longer than `patience` seconds for a call skips later workloads.
    """
    turns = Turns([], [], Roofline(num_threads))
    expected: dict[tuple[Path, Workload], torch.Tensor] = {}
    slow: dict[str, str] = {}
    for entrant in entrants:
        if entrant.module in slow:
            failed_row = Failed("too slow", slow[entrant.module]).row(entrant.name)
            turns.failed.append((entrant, failed_row))
            continue
        same = entrant.folder, entrant.work
        try:
            first, result = entrant.prepare()
            error = check(entrant, result, expected.get(same))
        except Failed as failed:
            turns.failed.append((entrant, failed.row(entrant.name)))
            continue
        if entrant.module == "ours":
            expected[same] = result
        lane = Lane(entrant, first, error, budget, short=short, long=long)
        if entrant.module == "ours":  # its first call, which touches memory first, is no sample
            lane = replace(lane, budget=budget * OURS, long=math.inf)
        elif first["stage"] + first["run"] > patience:
            slow[entrant.module] = f"{first['stage'] + first['run']:.1f} s for {entrant.work.name}"
        turns.lanes.append((entrant, lane))
    sampling.sample([lane for _, lane in turns.lanes], turns.roofline)
    return turns


def check(entrant: Entrant, result: torch.Tensor, expected: torch.Tensor | None) -> float:
    """The largest relative error of a row; Failed if no rounding explains it."""
    pairs = [(result, expected)] if expected is not None else spots(entrant, result)
    error = 0.0
    for ours, right in pairs:
        difference = (ours.double() - right.double()).flatten(1).norm(dim=1)
        error = max(error, float((difference / right.double().flatten(1).norm(dim=1)).max()))
    bound = accuracy.attention(entrant.work.dtype, entrant.module, entrant.work.kv_dtype)
    if not error <= bound:
        raise Failed("wrong", f"relative error {error:.2g}, where {bound:.2g} may be")
    return error


def spots(entrant: Entrant, result: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of the result and the oracle's, each for the queries of one head of the cache."""
    work = entrant.work
    tensors = inputs.mapped(work, entrant.folder)
    group = work.num_heads // work.num_kv_heads
    for turn, i in enumerate(sorted({0, len(work.new) - 1})):
        begin, end = starts(work.new)[i]
        row = end - 1 - turn * (end - begin) // 2
        length = work.prefix[i] + row - begin + 1
        head = (5 * turn + row) % work.num_kv_heads
        heads = slice(head * group, (head + 1) * group)
        keys_and_values = tensors.tokens(i, 0, length, torch.float32)
        k, v = (x[:, None, head : head + 1] for x in keys_and_values)
        out, _ = cpattn.reference.paged_attention(
            tensors.q[row : row + 1, heads].float(),
            *(k, v),
            q_lens=[1],
            kv_lens=[length],
            block_tables=np.arange(length, dtype=np.int32)[None],
            scale=work.scale,
        )
        yield result[row : row + 1, heads], torch.from_numpy(np.asarray(out))


def timed_row(entrant: Entrant, lane: Lane, roofline: Roofline, by_bytes: bool) -> Row:
    """The row of an entrant that ran: as a share of the roofline, or of the bandwidth alone."""
    work = entrant.work
    if by_bytes:
        row = sampling.measured(lane, roofline.bytes(), (work.kv_bytes / 1e9, "GB"))
    else:
        peaks = roofline.flops(work.flop / work.bytes)
        row = sampling.measured(lane, peaks, (work.flop / 1e9, "GFLOP"))
    if lane.failed is None:
        row |= {name: lane.first[name] for name in ("version", "extra_memory", "note")}
        row |= {"ns_per_item": 1e9 * row["median"] / sum(work.new), "item": "token"}
    return row
