# SPDX-License-Identifier: Apache-2.0
"""Try an operator that selects keys, and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...findings import Report
from ..child import Child
from ..faults import FAULTS, Fault
from ..numbers import Array
from ..trials import Budget, Progress, smallest, sweep
from ..verdict import answered, check_usable, finding_of, report_of
from .cases import SelectionCase, cases, edge_cases, smaller
from .faults import SELECTION_FAULTS, explains, is_crowded
from .features import SelectionSignature
from .trials import SelectionTrial

_REASONS = {
    **dict.fromkeys(("OWN", "LEN", "PAD"), "no case has it"),
    "COV": "nothing is attended to", "LSE": "there is no log-sum-exp",
    "SEQ": "an operator issues no collectives", "XFER": "an operator sends nothing",
    "ADDR": "no scores are as large as 31 bits", "BAL": "time is not measured",
}  # fmt: skip
_OF_FORM = {"crash": "crash", "hang": "hang", "raised": "raises", "wrong-form": "wrong-form"}
_MOST_SHOWN = 6
_EXAMPLES = 400  # to find a smaller case among: few of many candidates show what is about thousands


@dataclass(eq=False)
class _Diagnosis:
    """A fault, the trials that it explains, and whether another trial shows it, too."""

    fault: Fault
    trials: list[SelectionTrial]
    shown_by: Callable[[SelectionTrial], bool]


def conform_selection(
    subject: str, child: Child, signature: SelectionSignature, budget: Budget, until: float,
    progress: Progress,
) -> Report:  # fmt: skip
    """What `conform` does, of an operator that selects keys."""

    def attempt(case: SelectionCase) -> SelectionTrial:
        return SelectionTrial(child.run(case), signature.shared)

    features = signature.features
    edges = list(edge_cases(features))
    trials = sweep(attempt, edges, cases(features), budget, progress)
    check_usable(subject, trials)
    rest, findings = replace(budget, until=until), []
    for diagnosis in _diagnose(trials):
        known = min(diagnosis.trials, key=lambda trial: trial.case.size).case
        least = smallest(
            attempt, smaller(known), diagnosis.trials, diagnosis.shown_by, rest, _EXAMPLES
        )
        found = finding_of(
            subject, diagnosis.fault, least, trials, len(diagnosis.trials), least.result.message
        )
        findings.append(replace(found, picture=_picture(least)))
    tried = [trial.case for trial in answered(trials)]
    covers = {
        "OWN": any(len(case.lengths) > 1 for case in tried),
        "LEN": any(len(set(case.lengths)) > 1 for case in tried),
        "TOPK": True,
        "PAD": any(min(case.lengths) < case.topk or case.high for case in tried),
    }
    facts = {"signature": signature.name, "seed": budget.seed, "edges": len(edges)}
    return report_of(subject, trials, findings, covers, _REASONS, facts)


def _diagnose(trials: Sequence[SelectionTrial]) -> list[_Diagnosis]:
    """The fault that explains most, then that which explains most of the rest, and so on."""
    found = []
    for verdict, name in _OF_FORM.items():
        alike = [trial for trial in trials if trial.verdict == verdict]
        if alike:
            found.append(_Diagnosis(FAULTS[name], alike, lambda t, v=verdict: t.verdict == v))  # type: ignore[misc]
    wrong = [trial for trial in trials if trial.verdict == "wrong"]
    right = [trial for trial in trials if trial.verdict == "right"]
    while wrong:
        diagnosis = _best(wrong, right)
        found.append(diagnosis)
        wrong = [trial for trial in wrong if trial not in diagnosis.trials]
    return found


def _best(wrong: list[SelectionTrial], right: list[SelectionTrial]) -> _Diagnosis:
    if _overflows(wrong, right):  # close scores are equal in 16 bits, which explains too much
        fault = SELECTION_FAULTS["topk-bucket-overflow"].fault
        return _Diagnosis(
            fault, wrong, lambda t: t.verdict == "wrong" and t.case.values != "normal"
        )
    explained = {
        name: [trial for trial in wrong if explains(found, trial)]
        for name, found in SELECTION_FAULTS.items()
    }
    name = max(explained, key=lambda name: len(explained[name]))
    if 2 * len(explained[name]) >= len(wrong):  # what explains less does so by chance
        best = SELECTION_FAULTS[name]
        return _Diagnosis(
            best.fault, explained[name], lambda t: t.verdict == "wrong" and explains(best, t)
        )
    known = [found for found in SELECTION_FAULTS.values() if found.explains]
    return _Diagnosis(
        SELECTION_FAULTS["topk-unknown"].fault, wrong,
        lambda t: t.verdict == "wrong" and not any(explains(found, t) for found in known),
    )  # fmt: skip


def _overflows(wrong: list[SelectionTrial], right: list[SelectionTrial]) -> bool:
    """Whether many candidates go wrong where they are close, and only there."""
    apart = {t.case.lengths for t in right if t.case.values == "normal"}
    few = {t.case.values for t in right if not is_crowded(t.case)}
    return all(
        is_crowded(t.case) and t.case.lengths in apart and t.case.values in few for t in wrong
    )


def _picture(trial: SelectionTrial) -> str:
    """Of the first wrong row, what is there and what is not."""
    if trial.verdict != "wrong":
        return trial.result.message
    row = trial.wrong_rows[0]
    chosen, scores = trial.indices[row], trial.scores[row]
    count = min(trial.case.topk, len(scores))
    best = np.argsort(-scores, kind="stable")[:count]
    inside = chosen[(chosen >= 0) & (chosen < len(scores))]
    missing = best[scores[best] > np.min(scores[inside], initial=np.inf)] if len(inside) else best
    missing = np.setdiff1d(missing, inside)
    lines = [
        f"row {row}: {len(scores)} candidates, top {trial.case.topk}",
        f"selected: {_some(chosen)}",
        f"best:     {_some(best)}",
    ]
    if len(missing):
        lines.append(f"missing:  {_some(missing)}, {len(missing)} in all")
    return "\n".join([*lines, f"wrong: {len(trial.wrong_rows)} of {len(trial.scores)} rows"])


def _some(values: Array) -> str:
    shown = ", ".join(map(str, values[:_MOST_SHOWN]))
    return shown + (", ..." if len(values) > _MOST_SHOWN else "")
