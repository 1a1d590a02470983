# SPDX-License-Identifier: Apache-2.0
"""Cases tried on an operator, each beside what is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, find, given, seed, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from .cases import Batch, Case, make_batch
from .judgement import Differences, Result, differences, fits
from .numbers import Array
from .oracle import Attended, attend
from .switches import RIGHT, Switches, can_matter

_MOST_LOST = {"crash": 4, "hang": 2}  # then no more cases are tried: each takes a process
_SHRINKING_EXAMPLES = 60

Progress = Callable[[int, int | None, str], None]


@dataclass(frozen=True, eq=False)
class Trial:
    """What came of a case, and what should have."""

    result: Result
    _fits: dict[Switches, bool] = field(default_factory=dict, repr=False)

    @property
    def case(self) -> Case:
        return self.result.case

    @cached_property
    def batch(self) -> Batch:
        return make_batch(self.case)

    @cached_property
    def expected(self) -> Attended:
        return attend(self.batch)

    @cached_property
    def found(self) -> Differences:
        """Where it differs."""
        return differences(self.result, self.expected)

    @cached_property
    def verdict(self) -> str:
        """ "right", "out" or "lse" for what is wrong, a side effect, or why there is no answer."""
        if self.result.status != "answered":
            return self.result.status
        if self.found.out.any():
            return "out"
        return "lse" if self.found.lse.any() else self.result.side_effect or "right"

    @property
    def wrong_rows(self) -> Array:
        """[rows, heads], bool."""
        rows: Array = self.found.out.any(axis=-1) | self.found.lse
        return rows

    def agrees_with(self, switches: Switches) -> bool:
        """Whether a wrong oracle gives what the operator gave: outputs, and log-sum-exps beside
        right ones."""
        if not can_matter(switches, self.case):
            switches = RIGHT
        if switches not in self._fits:
            channel = "out" if self.verdict == "out" else "lse"
            wrong = attend(self.batch, switches)
            self._fits[switches] = fits(self.result, wrong, channel, switches)
        return self._fits[switches]

    def is_changed_by(self, switches: Switches) -> bool:
        """Whether a wrong oracle gives something else than what is right."""
        lse = None if self.result.lse is None else self.expected.lse
        right = Result(self.case, "answered", self.expected.out, lse)
        return not fits(right, attend(self.batch, switches), "lse", switches)


@dataclass(frozen=True)
class Budget:
    """How much may be tried."""

    examples: int
    until: float  # of the monotonic clock
    seed: int

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


class Judged(Protocol):
    """A trial of any operator."""

    @property
    def case(self) -> Any: ...
    @property
    def result(self) -> Any: ...
    @property
    def verdict(self) -> str: ...


CaseT = TypeVar("CaseT")
TrialT = TypeVar("TrialT", bound=Judged)


def sweep(
    attempt: Callable[[CaseT], TrialT], edges: list[CaseT], others: SearchStrategy[CaseT],
    budget: Budget, progress: Progress,
) -> list[TrialT]:  # fmt: skip
    """Try every edge, then what Hypothesis makes as far as the budget goes."""
    trials: dict[CaseT, TrialT] = {}
    total = len(edges) + budget.examples

    def once(case: CaseT) -> None:
        lost = [trial.verdict for trial in trials.values()]
        given_up = any(lost.count(verdict) >= most for verdict, most in _MOST_LOST.items())
        if case not in trials and not given_up and (case in edges or not budget.is_over):
            trials[case] = attempt(case)
            _ = trials[case].verdict  # compared at once, as time is counted
            progress(len(trials), total, "trying cases")

    for case in edges:
        once(case)
    quiet = settings(
        max_examples=max(budget.examples, 1), database=None, deadline=None,
        phases=[Phase.generate], verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    if budget.examples:
        seed(budget.seed)(quiet(given(others)(once)))()
    return list(trials.values())


def smallest(
    attempt: Callable[[CaseT], TrialT], others: SearchStrategy[CaseT], known: list[TrialT],
    shows: Callable[[TrialT], bool], budget: Budget, examples: int = _SHRINKING_EXAMPLES,
) -> TrialT:  # fmt: skip
    """The smallest trial that shows a fault: of those known, and of what Hypothesis shrinks to."""
    tried: dict[CaseT, TrialT] = {}

    def holds(case: CaseT) -> bool:
        if case not in tried:
            if budget.is_over:
                return False
            tried[case] = attempt(case)
        return shows(tried[case])

    quiet = settings(
        max_examples=examples, database=None, deadline=None, derandomize=True,
        phases=[Phase.generate, Phase.shrink], verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    if known[0].verdict != "hang" and not budget.is_over:  # else each takes all of the time limit
        with suppress(NoSuchExample):
            find(others, holds, settings=quiet)
    return min([*known, *filter(shows, tried.values())], key=lambda trial: trial.case.size)
