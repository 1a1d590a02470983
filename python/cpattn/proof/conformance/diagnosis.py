# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of an operator: the known fault that explains its wrong results.

A wrong oracle names a fault only if no trial that came out right speaks against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from .faults import FAULTS, Fault
from .numbers import Array
from .oracle import attend
from .switches import RIGHT, Switches, changed_by
from .tolerances import ACCUMULATOR_RATIO
from .trials import Trial

_SAMPLE = 16  # wrong trials, of which one must be explained by an oracle that is worth more time
_AT_ONCE = 4  # of them, the smallest first
_CHANCE = 8  # a fault must explain one in so many trials that it would change


@dataclass(eq=False)
class Diagnosis:
    """A fault, and the trials that it explains.

    Attributes
    ----------
    channel : {"out", "lse", "form"}
        What is wrong.
    switches : Switches or None
        The oracle that fits, of those of the fault.
    also : list of str
        Other faults that explain the same trials as well.
    contradicted : dict of str to int
        Under "unknown", a fault that explains all of the trials, and how many others came out
        right against it.
    others : list of Switches
        Of the other diagnoses, which explain other trials.
    """

    fault: Fault
    channel: str
    switches: Switches | None = None
    trials: list[Trial] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    contradicted: dict[str, int] = field(default_factory=dict)
    others: list[Switches] = field(default_factory=list)

    def shown_by(self, trial: Trial) -> bool:
        """Whether a trial shows the same fault."""
        if self.fault.name in _FAR and not trial.case.far:
            return False
        if self.channel == "form":
            return trial.verdict == self.trials[0].verdict
        if trial.verdict != self.channel:
            return False
        if self.switches is None:
            return not any(map(trial.agrees_with, self.others))
        return trial.agrees_with(self.switches) and not trial.agrees_with(RIGHT)


_FAR = ("overflow-32-bit", "page-id-16-bit")


def diagnose(trials: Sequence[Trial]) -> list[Diagnosis]:
    """One diagnosis for each fault; together they are about all trials that went wrong."""
    right = [t for t in trials if t.verdict == "right" or t.verdict == t.result.side_effect]
    right.sort(key=lambda t: t.case.size)
    failed = [t for t in trials if t.verdict not in ("right", "refused")]
    of_far = FAULTS["page-id-16-bit" if any(t.case.far == 16 for t in failed) else _FAR[0]]
    found = _of_form(trials, right, of_far)
    for channel in ("out", "lse"):
        known = [diagnosis.switches for diagnosis in found if diagnosis.switches]
        wrong = [
            trial
            for trial in trials
            if trial.verdict == channel and not any(map(trial.agrees_with, known))
        ]
        near = [trial for trial in wrong if not trial.case.far]
        far = [trial for trial in wrong if trial.case.far]
        if far and channel == "out" and _only_far(far, right):
            found.append(Diagnosis(of_far, channel, None, far))
            far = []
        near = near or far  # pages that are wrong near by, too, tell less where they are far
        found += _of_values(near, right, channel) if near else []
    return found


def _of_form(trials: Sequence[Trial], right: Sequence[Trial], of_far: Fault) -> list[Diagnosis]:
    """Of what gave no answer."""
    found: dict[str, Diagnosis] = {}
    for trial in trials:
        name = trial.verdict
        if name not in ("crash", "hang", "raised", "wrong-form", trial.result.side_effect):
            continue
        case = trial.case
        name = {"raised": "raises"}.get(name, name)
        if name == "wrong-form" and case.v_head_dim != case.head_dim:
            narrow = any(t.case.v_head_dim != t.case.head_dim for t in right)
            equal = any(t.case.v_head_dim == t.case.head_dim for t in right)
            name = "v-head-dim" if equal and not narrow else name
        if case.far and name in ("crash", "raises") and _only_far([trial], right):
            name = of_far.name
        found.setdefault(name, Diagnosis(FAULTS[name], "form")).trials.append(trial)
    return list(found.values())


def _only_far(wrong: Sequence[Trial], right: Sequence[Trial]) -> bool:
    """Whether pages fail where they are far, and only there."""
    near = {replace(trial.case, far=0) for trial in wrong}
    return all(t.case.far for t in wrong) and near <= {trial.case for trial in right}


def _of_values(wrong: list[Trial], right: list[Trial], channel: str) -> list[Diagnosis]:
    """The fault that explains most, then that which explains most of the rest, and so on."""
    by_rule = _rule(wrong, right) if channel == "out" else None
    if by_rule:
        return [Diagnosis(FAULTS[by_rule], channel, None, wrong)]
    rest = [trial for trial in wrong if not trial.agrees_with(RIGHT)]
    found: dict[str, Diagnosis] = {}
    while rest:
        for part in _sample(rest):
            candidates = _candidates(part, rest)
            best = next((c for c in candidates if c.holds(rest, right)), None)
            if best is not None:
                break
        else:
            break
        new = Diagnosis(best.fault, channel, best.switches)
        diagnosis = found.setdefault(best.fault.name, new)
        diagnosis.trials += best.explained
        diagnosis.also += _equals(candidates, best, right)
        rest = [trial for trial in rest if trial not in best.explained]
    both = list(_together(d.switches for d in found.values() if d.switches))
    for diagnosis in found.values():
        diagnosis.trials += [t for t in rest if any(map(t.agrees_with, both))]
    rest = [trial for trial in rest if not any(map(trial.agrees_with, both))]
    if rest or not found:  # or no wrong oracle could be told from the right one
        known = [*both, *(d.switches for d in found.values() if d.switches)]
        unknown = Diagnosis(FAULTS["unknown"], channel, None, rest or wrong, others=known)
        unknown.contradicted = _contradicted(rest, right)
        found["unknown"] = unknown
    return list(found.values())


def _together(switches: Iterable[Switches]) -> Iterable[Switches]:
    """Two faults at once."""
    for one, other in combinations(switches, 2):
        yield replace(other, **changed_by(one))


@dataclass(eq=False)
class _Candidate:
    """A wrong oracle, and the trials that it explains."""

    fault: Fault
    switches: Switches
    explained: list[Trial]

    def holds(self, wrong: list[Trial], right: list[Trial]) -> bool:
        """Whether no right trial speaks against it, and it explains more than chance would."""
        if not all(trial.agrees_with(self.switches) for trial in right):
            return False
        most = _CHANCE * len(self.explained)
        if most >= len(wrong):
            return True
        left = [trial for trial in wrong if not trial.agrees_with(self.switches)]
        return most >= sum(trial.is_changed_by(self.switches) for trial in left)


def _sample(wrong: list[Trial]) -> Iterable[list[Trial]]:
    """The smallest trials, and some of all sizes, a few at a time."""
    by_size = sorted(wrong, key=lambda trial: trial.case.size)
    few, others = by_size[: _SAMPLE - _AT_ONCE], by_size[_SAMPLE - _AT_ONCE :]
    few += others[:: -(-len(others) // _AT_ONCE)] if others else []
    return (few[i : i + _AT_ONCE] for i in range(0, len(few), _AT_ONCE))


def _candidates(part: list[Trial], wrong: list[Trial]) -> list[_Candidate]:
    """Each oracle that explains one of a part, those that explain most first, then in order."""
    found: list[_Candidate] = []
    for fault in FAULTS.values():
        for switches in fault.variants:
            if any(trial.agrees_with(switches) for trial in part):
                explained = [trial for trial in wrong if trial.agrees_with(switches)]
                found.append(_Candidate(fault, switches, explained))
    return sorted(found, key=lambda candidate: -len(candidate.explained))


def _equals(candidates: list[_Candidate], best: _Candidate, right: list[Trial]) -> list[str]:
    """Other faults that explain as much, and are contradicted as little."""
    names = {
        other.fault.name
        for other in candidates
        if other.fault is not best.fault
        and len(other.explained) == len(best.explained)
        and all(trial.agrees_with(other.switches) for trial in right)
    }
    return sorted(names)


def _contradicted(wrong: list[Trial], right: list[Trial]) -> dict[str, int]:
    """The fault that explains all that is wrong, with fewest right trials against it."""
    against = {
        candidate.fault.name: sum(not t.agrees_with(candidate.switches) for t in right)
        for candidate in _candidates(wrong[:1], wrong)
        if len(candidate.explained) == len(wrong)
    }
    least = min(against, key=lambda name: against[name], default=None)
    return {} if least is None else {least: against[least]}


def _rule(wrong: list[Trial], right: list[Trial]) -> str | None:
    """The faults that no single oracle tells."""
    if _only_poison(wrong, right):
        return "reads-beyond-length"
    single = [trial for trial in right if trial.case.dtype == "float32"]
    narrow = all(trial.case.dtype != "float32" for trial in wrong)
    tried = single or all(trial.case.dtype != "float32" for trial in right)
    if narrow and tried and all(map(_looks_accumulated, wrong)):
        return "16-bit-accumulation"
    return None


def _only_poison(wrong: Sequence[Trial], right: Sequence[Trial]) -> bool:
    """Whether all that is wrong is NaN, and only where what nobody may read is.

    Kernels that skip pages for some rows, and multiply what other rows may not read by weights of
    0, give NaN in rows of which no oracle knows.
    """
    return any(not trial.case.poison for trial in right) and all(
        trial.case.poison and np.isnan(_given(trial)[trial.found.out]).all() for trial in wrong
    )


def _given(trial: Trial) -> Array:
    """The output of an operator that answered."""
    assert trial.result.out is not None
    return trial.result.out


def _looks_accumulated(trial: Trial) -> bool:
    """Whether errors are of the size that a sum in 16 bits has."""
    simulated = attend(trial.batch, replace(RIGHT, accumulator=trial.case.dtype)).out
    error, predicted = _given(trial) - trial.expected.out, simulated - trial.expected.out
    if not np.isfinite(error).all():
        return False
    size, usual = (float(np.sqrt(np.mean(x * x))) for x in (error, predicted))
    return usual > 0 and usual / ACCUMULATOR_RATIO <= size <= usual * ACCUMULATOR_RATIO
