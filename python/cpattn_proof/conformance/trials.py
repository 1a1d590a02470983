# SPDX-License-Identifier: Apache-2.0
"""Cases tried on an operator, each with the correct result."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from hypothesis import HealthCheck, Phase, Verbosity, find, given, seed, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from .faults import Fault
from .judgement import Result

_MOST_LOST = {"crash": 4, "hang": 2}  # after so many no case is tried: each costs a process
_SHRINKING_EXAMPLES = 60

Progress = Callable[[int, int | None, str], None]


class Kind(NamedTuple):
    """Properties of attention operators, or of operators that select keys.

    An oracle is right, or wrong in known ways. Functions get sequences of trials of the kind.
    """

    edge_cases: Callable[[Any], Iterable[Any]]  # edge cases for features
    cases: Callable[[Any, Any], SearchStrategy[Any]]  # takes features, and a similar case or None
    judge: Callable[[Result, Any], Trial]  # makes a trial of a result and the signature
    channels: tuple[str, ...]  # verdicts of wrong answers; each is diagnosed separately
    faults: Mapping[str, Fault]  # faults of wrong answers
    unknown: str  # fault of answers that no oracle explains
    right: Any  # the right oracle
    rule: Callable[[Any, Any], str]  # finds a fault of all wrong trials beside right ones, or ""
    chance: int  # most unexplained wrong trials per trial that a fault explains
    together: Callable[[Any, Any], Any]  # makes an oracle that is wrong in the ways of two
    told: Callable[[Any], dict[str, Any]]  # describes a wrong oracle, for JSON
    covers: Callable[[Any], dict[str, bool]]  # whether answered cases could break each invariant
    reasons: Mapping[str, str]  # why an invariant is not checked


@dataclass(frozen=True, eq=False)
class Trial(ABC):
    """Result of an operator on a case, with the correct result."""

    result: Result
    kind: ClassVar[Kind]

    @property
    def case(self) -> Any:
        return self.result.case

    @property
    @abstractmethod
    def verdict(self) -> str:
        """Verdict: "right", a channel, a side effect, or why there is no answer."""

    @cached_property
    def _agreements(self) -> dict[Any, bool]:
        return {}

    def agrees_with(self, oracle: Any) -> bool:
        """Tell whether an oracle gives the operator's result."""
        if oracle not in self._agreements:
            self._agreements[oracle] = self._compare(oracle)
        return self._agreements[oracle]

    @abstractmethod
    def _compare(self, oracle: Any) -> bool: ...

    def is_changed_by(self, oracle: Any) -> bool:
        """Tell whether a wrong oracle may differ from the right one on this case."""
        return True

    def name_of_form(self, right: Sequence[Any]) -> str:
        """Name the fault of a case without an answer, given the right trials."""
        return {"raised": "raises"}.get(self.verdict, self.verdict)

    def said(self) -> str:
        """Say why there is no answer, or how far a wrong one is off, in half a sentence."""
        return self.result.message

    def picture(self) -> str:
        """Show in lines where the answer is wrong, or say why there is none."""
        return self.result.message


@dataclass(frozen=True)
class Budget:
    """Limits on the number of cases and the time."""

    examples: int
    until: float  # time of the monotonic clock
    seed: int

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


def sweep(
    attempt: Callable[[Any], Trial], edges: list[Any], others: SearchStrategy[Any],
    budget: Budget, progress: Progress,
) -> list[Trial]:  # fmt: skip
    """Try every edge case, then cases by Hypothesis within the budget."""
    trials: dict[Any, Trial] = {}
    total = len(edges) + budget.examples

    def once(case: Any) -> None:
        lost = [trial.verdict for trial in trials.values()]
        given_up = any(lost.count(verdict) >= most for verdict, most in _MOST_LOST.items())
        if case not in trials and not given_up and (case in edges or not budget.is_over):
            trials[case] = attempt(case)
            _ = trials[case].verdict  # compare now: the budget counts this time, too
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
    attempt: Callable[[Any], Trial], others: SearchStrategy[Any], known: list[Trial],
    shows: Callable[[Trial], bool], budget: Budget,
) -> Trial:  # fmt: skip
    """Return the smallest trial that shows a fault, known or found by shrinking."""
    tried: dict[Any, Trial] = {}

    def holds(case: Any) -> bool:
        if case not in tried:
            if budget.is_over:
                return False
            tried[case] = attempt(case)
        return shows(tried[case])

    quiet = settings(
        max_examples=_SHRINKING_EXAMPLES, database=None, deadline=None, derandomize=True,
        phases=[Phase.generate, Phase.shrink], verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    if known[0].verdict != "hang" and not budget.is_over:  # a hang takes the whole time limit
        with suppress(NoSuchExample):
            find(others, holds, settings=quiet)
    return min([*known, *filter(shows, tried.values())], key=lambda trial: trial.case.size)
