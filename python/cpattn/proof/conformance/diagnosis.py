# SPDX-License-Identifier: Apache-2.0
"""Which known fault explains what an operator gets wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .faults import FAULTS, Fault
from .judgement import fits
from .numbers import Array
from .oracle import attend
from .switches import RIGHT, Switches
from .tolerances import ACCUMULATOR_RATIO
from .trials import Trial

_SAMPLE = 20  # trials that oracles are held against
_FIRST = 4  # of which the smallest decide whether an oracle is worth more time


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
    others : list of Switches
        Of the other diagnoses, which explain other trials.
    """

    fault: Fault
    channel: str
    switches: Switches | None = None
    trials: list[Trial] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    others: list[Switches] = field(default_factory=list)

    def shown_by(self, trial: Trial) -> bool:
        """Whether a trial shows the same fault."""
        if self.fault.name == "overflow-32-bit" and not trial.case.far:
            return False
        if self.channel == "form":
            return trial.verdict == self.trials[0].verdict
        if trial.verdict != self.channel:
            return False
        if self.switches is None:
            return not any(_explains(trial, other) for other in self.others)
        return _explains(trial, self.switches) and not _explains(trial, RIGHT)


def diagnose(trials: Sequence[Trial]) -> list[Diagnosis]:
    """One diagnosis for each fault; together they are about all trials that went wrong."""
    right = [trial for trial in trials if trial.verdict == "right"]
    found = _of_form(trials, right)
    for channel in ("out", "lse"):
        known = [diagnosis.switches for diagnosis in found if diagnosis.switches]
        wrong = [
            trial
            for trial in trials
            if trial.verdict == channel
            and not any(_explains(trial, switches) for switches in known)
        ]
        near = [trial for trial in wrong if not trial.case.far]
        far = [trial for trial in wrong if trial.case.far]
        if near and far and channel == "out" and _only_far(far, right):
            found.append(Diagnosis(FAULTS["overflow-32-bit"], channel, None, far))
        found += _of_values(near or wrong, right, channel) if wrong else []
    return found


def _of_form(trials: Sequence[Trial], right: Sequence[Trial]) -> list[Diagnosis]:
    """Of what gave no answer."""
    found: dict[str, Diagnosis] = {}
    for trial in trials:
        name = trial.verdict
        if name not in ("crash", "hang", "raised", "wrong-form"):
            continue
        case = trial.case
        name = {"raised": "raises"}.get(name, name)
        if name == "wrong-form" and case.v_head_dim != case.head_dim:
            narrow = any(t.case.v_head_dim != t.case.head_dim for t in right)
            equal = any(t.case.v_head_dim == t.case.head_dim for t in right)
            name = "v-head-dim" if equal and not narrow else name
        if case.far and name in ("crash", "raises") and _only_far([trial], right):
            name = "overflow-32-bit"
        found.setdefault(name, Diagnosis(FAULTS[name], "form")).trials.append(trial)
    return list(found.values())


def _only_far(wrong: Sequence[Trial], right: Sequence[Trial]) -> bool:
    """Whether pages fail where they are far, and only there."""
    near = {replace(trial.case, far=False) for trial in wrong}
    return all(t.case.far for t in wrong) and near <= {trial.case for trial in right}


def _of_values(wrong: list[Trial], right: list[Trial], channel: str) -> list[Diagnosis]:
    """The fault that explains most, then that which explains most of the rest, and so on."""
    by_rule = _rule(wrong, right) if channel == "out" else None
    if by_rule:
        return [Diagnosis(FAULTS[by_rule], channel, None, wrong)]
    clear = [trial for trial in wrong if not _explains(trial, RIGHT)]
    if not clear:  # no wrong oracle could be told from the right one
        return [Diagnosis(FAULTS["unknown"], channel, None, wrong)]
    sample, others = _spread(clear), _spread(right)
    candidates = _candidates(sample, others)
    found: dict[str, Diagnosis] = {}
    while sample:
        best = _best(candidates, sample)
        fault = FAULTS["unknown"] if best is None else best.fault
        explained = sample if best is None else [t for t in sample if t in best.explained]
        new = Diagnosis(fault, channel, best.switches if best else None)
        diagnosis = found.setdefault(fault.name, new)
        diagnosis.trials += explained
        if best is not None:
            diagnosis.also += _equals(candidates, sample, best)
        sample = [t for t in sample if t not in explained]
    for diagnosis in found.values():
        diagnosis.others += [d.switches for d in found.values() if d.switches]
    return list(found.values())


@dataclass(eq=False)
class _Candidate:
    """A wrong oracle, and the trials that it explains."""

    fault: Fault
    switches: Switches
    explained: list[Trial]
    others: list[Trial]

    @cached_property
    def against(self) -> int:
        """How many trials were right that it has wrong."""
        return sum(not _explains(trial, self.switches) for trial in self.others)

    def among(self, sample: list[Trial]) -> int:
        """How many it explains."""
        return sum(trial in self.explained for trial in sample)


def _candidates(sample: list[Trial], others: list[Trial]) -> list[_Candidate]:
    """Each oracle that explains something, in the order of the faults."""
    found: list[_Candidate] = []
    first = [*sample[:_FIRST], *sample[_FIRST:][-2:]]
    for fault in FAULTS.values():
        for switches in fault.variants:
            if any(_explains(trial, switches) for trial in first):
                explained = [trial for trial in sample if _explains(trial, switches)]
                found.append(_Candidate(fault, switches, explained, others))
    return found


def _best(candidates: list[_Candidate], sample: list[Trial]) -> _Candidate | None:
    """The one that explains most of a sample; none if less than speaks against it."""
    most = max((candidate.among(sample) for candidate in candidates), default=0)
    if not most:
        return None
    best = min((c for c in candidates if c.among(sample) == most), key=lambda c: c.against)
    return best if most == len(sample) or most > best.against else None


def _equals(candidates: list[_Candidate], sample: list[Trial], best: _Candidate) -> list[str]:
    """Other faults that explain the same and have as little against them."""
    names = {
        other.fault.name
        for other in candidates
        if other.fault is not best.fault
        and other.among(sample) == best.among(sample)
        and other.against <= best.against
    }
    return sorted(names)


def _explains(trial: Trial, switches: Switches) -> bool:
    """Whether a wrong oracle gives what the operator gave."""
    channel = "lse" if trial.verdict == "lse" else "out"
    if trial.verdict == "right" and trial.result.lse is not None:
        channel = "lse"
    return fits(trial.result, attend(trial.batch, switches), channel, switches)


def _spread(trials: list[Trial]) -> list[Trial]:
    """The smaller half of a sample, and some of the others, by size."""
    by_size = sorted(trials, key=lambda trial: trial.case.size)
    half = _SAMPLE // 2
    rest = by_size[half:]
    step = max(1, -(-len(rest) // half))
    return by_size[:half] + rest[step - 1 :: step]


def _rule(wrong: list[Trial], right: list[Trial]) -> str | None:
    """The faults that no single oracle tells."""
    if _only_far(wrong, right):
        return "overflow-32-bit"
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
