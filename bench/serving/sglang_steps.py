# SPDX-License-Identifier: Apache-2.0
"""Steps of sglang's engine: prompts of a length, and decoding behind others, by two in turns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.comparison import Bar, times_as_fast
from bench.harness.contender import Contender, Failed
from bench.harness.figures import Row
from bench.harness.sampling import spread
from bench.serving.sglang_process import BACKENDS, ENVIRONMENT, started_by
from bench.serving.turns import NEAR_TIE, compare_tokens

CHECKED_TOKENS = 4
STEPS = 32  # of a round of decoding


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `length`; with `steps`, as many tokens are decoded behind them."""

    batch: int
    length: int
    steps: int = 0
    bar: float | None = None  # times as fast as torch_native

    @property
    def name(self) -> str:
        if self.steps:
            return f"decode {self.batch} behind {self.length}"
        return f"prefill of {self.length}"

    @property
    def tokens(self) -> int:
        """Of what is timed: a step, or the prompts."""
        return self.batch if self.steps else self.batch * self.length

    @property
    def max_tokens(self) -> int:
        """In the cache at once, with a page to spare for each sequence."""
        return self.batch * (self.length + self.steps + 1)


CASES = (
    Case(1, 512, bar=1.4),
    Case(1, 2048, bar=1.8),
    Case(1, 4096, bar=2.6),
    Case(1, 2048, STEPS, bar=4.5),
    Case(8, 1024, STEPS, bar=6.5),
)
QUICK_CASES = (Case(1, 96), Case(2, 100, 4))


class Engine(Contender):
    """A child process with sglang's offline engine."""

    answer_seconds = 600.0  # importing sglang twice takes minutes where nothing is compiled yet

    def __init__(self, backend: str, num_threads: int, *arguments: object) -> None:
        command = [sys.executable, "-m", "bench.serving.sglang_engine", backend]
        variables = {"CPATTN_NUM_THREADS": str(num_threads), **ENVIRONMENT}
        super().__init__(backend, [*command, *map(str, arguments)], num_threads, variables)

    def stop(self) -> None:
        """With the processes that sglang started, one of which would not notice."""
        started = [] if self._process is None else started_by(self._process.pid)
        super().stop()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def engines_of(model: Path, num_threads: int, page_size: int, max_tokens: int) -> list[Engine]:
    return [Engine(backend, num_threads, model, page_size, max_tokens) for backend in BACKENDS]


def measure(engines: Sequence[Engine], case: Case, rounds: int, threads: int) -> list[Row]:
    """The rows of a case, cpattn's first. Failed if an engine is, or if their answers differ."""
    greedy = {"batch": case.batch, "length": case.length, "num_tokens": CHECKED_TOKENS}
    answers = [engine.ask("greedy", **greedy)["answers"] for engine in engines]
    compare_tokens(*answers)
    error = largest_difference(*answers)
    what = {"batch": case.batch, "length": case.length}
    do = "prefill"
    if case.steps:
        do, what["steps"] = "decode", case.steps
    seconds: list[list[float]] = [[] for _ in engines]
    for warm in (False, *(True for _ in range(rounds))):
        for engine, own in zip(engines, seconds, strict=True):
            taken = engine.ask(do, **what)["seconds"]
            if warm:
                own.append(taken)
    rows = {
        engine.name: row_of(engine.name, case, own, 0.0 if place == 0 else error, threads)
        | {"sglang": engine.version}
        for place, (engine, own) in enumerate(zip(engines, seconds, strict=True))
    }
    if case.bar is not None:
        bar: Bar = times_as_fast("cpattn", "torch_native", case.bar, "torch_native")
        rows["cpattn"]["bars"] = [bar.judge(rows)]
    return [rows[name] for name in reversed(BACKENDS)]


def row_of(name: str, case: Case, seconds: list[float], error: float, threads: int) -> Row:
    """As the harness writes those of comparisons; `error` is of log probabilities."""
    return {
        "part": "steps",
        "case": {"workload": case.name, "threads": threads},
        "implementation": name,
        "status": "ok",
        "median": median(seconds),
        "minimum": min(seconds),
        "spread": spread(seconds),
        "samples": len(seconds),
        "dropped": 0,
        "error": error,
        "ns_per_item": 1e9 * median(seconds) / case.tokens,
        "item": "token",
    }


def largest_difference(
    expected: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> float:
    """Of log probabilities of the first tokens, those best in both. Failed if it is no rounding."""
    largest = 0.0
    for number, (one, other) in enumerate(zip(expected, answers, strict=True)):
        right, found = one["best"][0], other["best"][0]
        both = right.keys() & found.keys()
        if not both:
            raise Failed("wrong", f"answer {number}: no token is among the best of both")
        for token in both:
            difference = abs(right[token] - found[token])
            if not difference <= NEAR_TIE:
                raise Failed("wrong", f"answer {number}: token {token} is {difference:.2g} off")
            largest = max(largest, difference)
    return largest
