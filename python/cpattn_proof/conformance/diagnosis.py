# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of an operator: the known fault that explains its wrong results.

A wrong oracle names a fault only if no correct trial contradicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from .faults import FAULTS, Fault
from .trials import Trial

_SAMPLE = 16  # wrong trials; an oracle must explain one to be tried further
_AT_ONCE = 4  # trials of the sample that are tried together, the smallest first


@dataclass(eq=False)
class Diagnosis:
    """A fault, and the trials that it explains.

    Attributes
    ----------
    channel : str
        What is wrong: "form", or one of `Kind.channels`.
    oracle : optional
        The oracle of the fault that fits.
    also : list of str
        Other faults that explain the same trials equally well.
    contradicted : dict of str to int
        For an unknown fault: a fault that explains all the trials, and the number of correct trials
        that contradict it.
    others : list
        Oracles of the other diagnoses, which explain other trials.
    """

    fault: Fault
    channel: str
    oracle: Any = None
    trials: list[Trial] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    contradicted: dict[str, int] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)

    def shown_by(self, trial: Trial) -> bool:
        """Tell whether a trial shows the same fault."""
        if self.fault.name in _FAR and not trial.case.far:
            return False
        if self.channel == "form":
            return trial.verdict == self.trials[0].verdict
        if trial.verdict != self.channel:
            return False
        if self.oracle is None:
            return not any(map(trial.agrees_with, self.others))
        return trial.agrees_with(self.oracle) and not trial.agrees_with(trial.kind.right)


_FAR = ("overflow-32-bit", "page-id-16-bit")


def diagnose(trials: Sequence[Trial]) -> list[Diagnosis]:
    """Return one diagnosis for each fault; together they cover all wrong trials."""
    right = [t for t in trials if t.verdict == "right" or t.verdict == t.result.side_effect]
    right.sort(key=lambda t: t.case.size)
    failed = [t for t in trials if t.verdict not in ("right", "refused")]
    of_far = FAULTS["page-id-16-bit" if any(t.case.far == 16 for t in failed) else _FAR[0]]
    found = _of_form(trials, right, of_far)
    for channel in trials[0].kind.channels:
        known = _oracles(found)
        wrong = [
            trial
            for trial in trials
            if trial.verdict == channel and not any(map(trial.agrees_with, known))
        ]
        near = [trial for trial in wrong if not trial.case.far]
        far = [trial for trial in wrong if trial.case.far]
        if far and channel != "lse" and _only_far(far, right):
            found.append(Diagnosis(of_far, channel, None, far))
            far = []
        near = near or far  # if near pages are wrong, too, far pages tell less
        found += _of_values(near, right, channel) if near else []
    return found


def _of_form(trials: Sequence[Trial], right: Sequence[Trial], of_far: Fault) -> list[Diagnosis]:
    """Diagnose trials without an answer, with a wrong form, or with a side effect."""
    found: dict[str, Diagnosis] = {}
    for trial in trials:
        name = trial.verdict
        if name not in ("crash", "hang", "raised", "wrong-form", trial.result.side_effect):
            continue
        name = trial.name_of_form(right)
        if trial.case.far and name in ("crash", "raises") and _only_far([trial], right):
            name = of_far.name
        found.setdefault(name, Diagnosis(FAULTS[name], "form")).trials.append(trial)
    return list(found.values())


def _only_far(wrong: Sequence[Trial], right: Sequence[Trial]) -> bool:
    """Tell whether only far pages fail."""
    near = {replace(trial.case, far=0) for trial in wrong}
    return all(t.case.far for t in wrong) and near <= {trial.case for trial in right}


def _of_values(wrong: list[Trial], right: list[Trial], channel: str) -> list[Diagnosis]:
    """Find the fault that explains most trials, then most of the rest, and so on."""
    kind, rest = wrong[0].kind, wrong
    found: dict[str, Diagnosis] = {}
    while rest:
        if name := kind.rule(rest, right):
            known = _oracles(found.values())
            new = Diagnosis(kind.faults[name], channel, others=known)
            found.setdefault(name, new).trials += rest
            return list(found.values())
        rest = [trial for trial in rest if not trial.agrees_with(trial.kind.right)]
        for part in _sample(rest):
            candidates = _candidates(part, rest)
            best = next((c for c in candidates if c.holds(rest, right)), None)
            if best is not None:
                break
        else:
            break
        new = Diagnosis(best.fault, channel, best.oracle)
        diagnosis = found.setdefault(best.fault.name, new)
        diagnosis.trials += best.explained
        diagnosis.also += _equals(candidates, best, right)
        rest = [trial for trial in rest if trial not in best.explained]
    known = _oracles(found.values())
    both = [kind.together(one, other) for one, other in combinations(known, 2)]
    for diagnosis in found.values():
        diagnosis.trials += [t for t in rest if any(map(t.agrees_with, both))]
    rest = [trial for trial in rest if not any(map(trial.agrees_with, both))]
    if rest or not found:  # if not `found`, no wrong oracle differs from the right one
        fault = kind.faults[kind.unknown]
        unknown = Diagnosis(fault, channel, None, rest or wrong, others=[*both, *known])
        unknown.contradicted = _contradicted(rest, right)
        found[fault.name] = unknown
    return list(found.values())


def _oracles(found: Iterable[Diagnosis]) -> list[Any]:
    return [diagnosis.oracle for diagnosis in found if diagnosis.oracle]


@dataclass(eq=False)
class _Candidate:
    """A wrong oracle, and the trials that it explains."""

    fault: Fault
    oracle: Any
    explained: list[Trial]

    def holds(self, wrong: list[Trial], right: list[Trial]) -> bool:
        """Tell whether no correct trial contradicts it, and it explains more than chance would."""
        if not all(trial.agrees_with(self.oracle) for trial in right):
            return False
        most = wrong[0].kind.chance * len(self.explained)
        if most >= len(wrong):
            return True
        left = [trial for trial in wrong if not trial.agrees_with(self.oracle)]
        return most >= sum(trial.is_changed_by(self.oracle) for trial in left)


def _sample(wrong: list[Trial]) -> Iterable[list[Trial]]:
    """Return the smallest trials, and some of all sizes, a few at a time."""
    by_size = sorted(wrong, key=lambda trial: trial.case.size)
    few, others = by_size[: _SAMPLE - _AT_ONCE], by_size[_SAMPLE - _AT_ONCE :]
    few += others[:: -(-len(others) // _AT_ONCE)] if others else []
    return (few[i : i + _AT_ONCE] for i in range(0, len(few), _AT_ONCE))


def _candidates(part: list[Trial], wrong: list[Trial]) -> list[_Candidate]:
    """Return oracles that explain a trial of a part, sorted by the number of explained trials."""
    found: list[_Candidate] = []
    for fault in part[0].kind.faults.values() if part else ():
        for oracle in fault.variants:
            if any(trial.agrees_with(oracle) for trial in part):
                explained = [trial for trial in wrong if trial.agrees_with(oracle)]
                found.append(_Candidate(fault, oracle, explained))
    return sorted(found, key=lambda candidate: -len(candidate.explained))


def _equals(candidates: list[_Candidate], best: _Candidate, right: list[Trial]) -> list[str]:
    """Return other faults that explain as many trials and are contradicted as rarely."""
    names = {
        other.fault.name
        for other in candidates
        if other.fault is not best.fault
        and len(other.explained) == len(best.explained)
        and all(trial.agrees_with(other.oracle) for trial in right)
    }
    return sorted(names)


def _contradicted(wrong: list[Trial], right: list[Trial]) -> dict[str, int]:
    """Return the fault that explains all wrong trials with the fewest contradictions."""
    against = {
        candidate.fault.name: sum(not t.agrees_with(candidate.oracle) for t in right)
        for candidate in _candidates(wrong[:1], wrong)
        if len(candidate.explained) == len(wrong)
    }
    least = min(against, key=lambda name: against[name], default=None)
    return {} if least is None else {least: against[least]}
