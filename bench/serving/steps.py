# SPDX-License-Identifier: Apache-2.0
"""Steps of two serving engines in turns: prompts of a length, and decoding behind contexts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from bench.harness.comparison import times_as_fast
from bench.harness.contender import Contender, Failed
from bench.harness.figures import Row
from bench.harness.sampling import spread
from bench.serving.turns import NEAR_TIE, compare_tokens

CHECKED_TOKENS = 4
STEPS = 32  # of a round of decoding


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `length`; with `steps`, as many tokens are decoded behind them."""

    batch: int
    length: int
    steps: int = 0
    bar: float | None = None  # times as fast as the engine's own attention

    @property
    def name(self) -> str:
        if self.steps:
            return f"decode {self.batch} behind {self.length}"
        return f"prefill of {self.length}"

    @property
    def tokens(self) -> int:
        """The tokens of the timed call: a step, or the prompts."""
        return self.batch if self.steps else self.batch * self.length

    @property
    def max_tokens(self) -> int:
        """The most tokens in the cache at once, with a spare page for each sequence."""
        return self.batch * (self.length + self.steps + 1)


def prompts_of(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same for each engine; no two prompts share a beginning."""
    return [random.Random(i).choices(range(vocab_size), k=length) for i in range(batch)]


@contextmanager
def seconds() -> Iterator[list[float]]:
    """A list that gets the seconds of the block when it ends."""
    taken: list[float] = []
    begin = perf_counter()
    yield taken
    taken.append(perf_counter() - begin)


def measure(
    engines: Sequence[Contender],
    case: Case,
    rounds: int,
    threads: int,
    *,
    part: str = "steps",
    around: str = "",
) -> list[Row]:
    """The rows of a case, cpattn's first: an engine with cpattn's attention, and with its own.

    `around` has further fields of the case. Failed if an engine is, or if their answers differ.
    """
    greedy = {"batch": case.batch, "length": case.length, "num_tokens": CHECKED_TOKENS}
    answers = [engine.ask("greedy", **greedy)["answers"] for engine in engines]
    compare_tokens(*answers)
    error = largest_difference(*answers)
    what = {"batch": case.batch, "length": case.length}
    do = "prefill"
    if case.steps:
        do, what["steps"] = "decode", case.steps
    return in_turns(engines, case, rounds, threads, do, what, error, part=part, around=around)


class Timed(Protocol):
    """Return the fields of a case for its rows."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def bar(self) -> float | None: ...


def in_turns(
    engines: Sequence[Contender],
    case: Timed,
    rounds: int,
    threads: int,
    do: str,
    what: Mapping[str, Any],
    error: float,
    *,
    part: str,
    around: str = "",
) -> list[Row]:
    """The rows of a compared case: the engines' seconds for the command `do`, in turns."""
    taken: list[list[float]] = [[] for _ in engines]
    for warm in (False, *(True for _ in range(rounds))):
        for engine, own in zip(engines, taken, strict=True):
            of_round = engine.ask(do, **what)["seconds"]
            if warm:
                own.append(of_round)
    theirs, ours = (
        row_of(engine.name, case, own, threads, around) | {"part": part, "engine": engine.version}
        for engine, own in zip(engines, taken, strict=True)
    )
    ours["error"] = error
    if case.bar is not None:
        own_name, name = theirs["implementation"], ours["implementation"]
        bar = times_as_fast(name, own_name, case.bar, own_name)
        ours["bars"] = [bar.judge({own_name: theirs, name: ours})]
    return [ours, theirs]


def row_of(name: str, case: Timed, taken: list[float], threads: int, around: str) -> Row:
    """A row in the harness's form; the error is one of log probabilities."""
    return {
        "case": {"workload": ", ".join(filter(None, (case.name, around))), "threads": threads},
        "implementation": name,
        "status": "ok",
        "median": median(taken),
        "minimum": min(taken),
        "spread": spread(taken),
        "samples": len(taken),
        "dropped": 0,
        "error": 0.0,
        "ns_per_item": 1e9 * median(taken) / case.tokens,
        "item": "token",
    }


def largest_difference(
    expected: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> float:
    """The largest difference of first tokens' best log probabilities. Failed beyond rounding."""
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
