# SPDX-License-Identifier: Apache-2.0
"""Cases tried on an operator, each beside what is right."""

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

_MOST_LOST = {"crash": 4, "hang": 2}  # then no more cases are tried: each takes a process
_SHRINKING_EXAMPLES = 60

Progress = Callable[[int, int | None, str], None]


class Kind(NamedTuple):
    """The particulars of operators of attention, or of those that select keys.

    An oracle is right, or wrong in known ways. Functions get trials of the kind, in sequences.
    """

    edge_cases: Callable[[Any], Iterable[Any]]  # of features
    cases: Callable[[Any, Any], SearchStrategy[Any]]  # of features, and like a case or None
    judge: Callable[[Result, Any], Trial]  # of a result and the signature
    channels: tuple[str, ...]  # verdicts of wrong answers, each of which is diagnosed by itself
    faults: Mapping[str, Fault]  # of wrong answers
    unknown: str  # the one of what no oracle explains
    right: Any  # the right oracle
    rule: Callable[[Any, Any], str]  # of wrong and of right ones: a fault of all of them, or ""
    chance: int  # wrong trials that a fault may not explain, for each that it does
    together: Callable[[Any, Any], Any]  # an oracle that is wrong in the ways of two
    told: Callable[[Any], dict[str, Any]]  # how an oracle is wrong, for JSON
    covers: Callable[[Any], dict[str, bool]]  # whether what was answered could break an invariant
    reasons: Mapping[str, str]  # why an invariant is not checked


@dataclass(frozen=True, eq=False)
class Trial(ABC):
    """An operator's result of a case, beside what is right."""

    result: Result
    kind: ClassVar[Kind]

    @property
    def case(self) -> Any:
        return self.result.case

    @property
    @abstractmethod
    def verdict(self) -> str:
        """ "right", a channel, a side effect, or why there is no answer."""

    @cached_property
    def _agreements(self) -> dict[Any, bool]:
        return {}

    def agrees_with(self, oracle: Any) -> bool:
        """Whether an oracle gives what the operator gave."""
        if oracle not in self._agreements:
            self._agreements[oracle] = self._compare(oracle)
        return self._agreements[oracle]

    @abstractmethod
    def _compare(self, oracle: Any) -> bool: ...

    def is_changed_by(self, oracle: Any) -> bool:
        """Whether a wrong oracle may give something else than what is right."""
        return True

    def name_of_form(self, right: Sequence[Any]) -> str:
        """The fault of what gave no answer, beside trials that came out right."""
        return {"raised": "raises"}.get(self.verdict, self.verdict)

    def said(self) -> str:
        """Says why there is no answer, or how far a wrong one is off, in half a sentence."""
        return self.result.message

    def picture(self) -> str:
        """Shows where it is wrong, in lines, or says why there is no answer."""
        return self.result.message


@dataclass(frozen=True)
class Budget:
    """Limits to what may be tried."""

    examples: int
    until: float  # of the monotonic clock
    seed: int

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


def sweep(
    attempt: Callable[[Any], Trial], edges: list[Any], others: SearchStrategy[Any],
    budget: Budget, progress: Progress,
) -> list[Trial]:  # fmt: skip
    """Try every edge, then what Hypothesis makes as far as the budget goes."""
    trials: dict[Any, Trial] = {}
    total = len(edges) + budget.examples

    def once(case: Any) -> None:
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
    attempt: Callable[[Any], Trial], others: SearchStrategy[Any], known: list[Trial],
    shows: Callable[[Trial], bool], budget: Budget,
) -> Trial:  # fmt: skip
    """The smallest trial that shows a fault: of those known, and of what Hypothesis shrinks to."""
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
    if known[0].verdict != "hang" and not budget.is_over:  # else each takes all of the time limit
        with suppress(NoSuchExample):
            find(others, holds, settings=quiet)
    return min([*known, *filter(shows, tried.values())], key=lambda trial: trial.case.size)
