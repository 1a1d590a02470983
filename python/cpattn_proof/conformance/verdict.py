# SPDX-License-Identifier: Apache-2.0
"""Reports of trials, with the scope of their verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..findings import Finding, NotUsable, Report
from .faults import Fault
from .trials import Trial

_LEAST_ANSWERED = 0.5  # an operator that answers a smaller part of the cases is not proved
_MOST_TOLD, _MOST_CHARACTERS = 3, 60  # number and length of reasons to refuse


def check_usable(subject: str, trials: Sequence[Trial]) -> None:
    """Raise NotUsable if no case was answered; crashes beside answers are findings."""
    if not answered(trials):
        first = trials[0]
        raise NotUsable(
            f"conform: {subject} answered none of {len(trials)} cases; the first "
            f"({first.case.text()}): {first.verdict}, {first.result.message}"
        )


def answered(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials with an answer, right or wrong."""
    return [trial for trial in trials if trial.result.status == "answered"]


def finding_of(
    subject: str, fault: Fault, least: Trial, trials: Sequence[Trial], count: int, said: str
) -> Finding:
    """Return the finding of a fault that `count` trials show; `least` is the smallest."""
    tried = sum(trial.verdict != "refused" for trial in trials)
    what = f"{subject} {fault.means}{': ' if said else ''}{said} ({count} of {tried} cases)"
    return Finding(
        fault.invariant, what, where=least.case.text(), advice=fault.advice, kind=fault.name,
        details={"case": least.case.as_dict(), "cases": count},
    )  # fmt: skip


def report_of(
    subject: str, trials: Sequence[Trial], findings: Sequence[Finding],
    covers: Mapping[str, bool], reasons: Mapping[str, str], facts: Mapping[str, Any],
) -> Report:  # fmt: skip
    """Return a report that says which invariants and cases its verdict covers.

    Parameters
    ----------
    covers : mapping
        Whether a tried case could break an invariant.
    reasons : mapping
        Why an invariant is not checked. If a finding breaks one, it counts as checked.
    """
    broken = {finding.invariant for finding in findings}
    checked = [id for id, yes in covers.items() if yes or id in broken]
    checked += [id for id in reasons if id in broken and id not in checked]
    messages = (t.result.message for t in trials if t.verdict == "refused")
    refused = Counter(re.sub(r"\d+", "#", message) for message in messages)
    scope = _scope(trials, refused) if refused else ""
    enough = len(answered(trials)) >= _LEAST_ANSWERED * len(trials)
    undecided = "" if enough else "fewer than half were answered; leave out what is not claimed"
    facts = {"cases": len(trials), "answered": len(answered(trials)), **facts}
    return Report(
        "conform", subject, tuple(findings), tuple(checked),
        {id: reason for id, reason in reasons.items() if id not in checked},
        scope=scope, undecided=undecided, facts=facts | {"refused": dict(refused.most_common())},
    )  # fmt: skip


def _scope(trials: Sequence[Trial], refused: Counter[str]) -> str:
    """Return the number of answered cases, and the most common reasons to refuse others."""
    told = [f"{count} {_short(said)}" for said, count in refused.most_common(_MOST_TOLD)]
    told += ["..."] * (len(refused) > _MOST_TOLD)
    count = f"{len(answered(trials))} of {len(trials)} cases answered"
    return f"{count}, {refused.total()} refused ({', '.join(told)})"


def _short(message: str) -> str:
    """Return the words of an exception without its type, cut if they are long."""
    text = message.partition(": ")[2] or message
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
