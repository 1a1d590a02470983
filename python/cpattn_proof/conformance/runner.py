# SPDX-License-Identifier: Apache-2.0
"""Run of the conformance test, and its report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from typing import Any

from ..findings import Finding, NotUsable, Report
from ..requirements import require as requiring
from .child import Child, Operator, load
from .diagnosis import Diagnosis, diagnose
from .selection import SELECTION_SIGNATURES, SelectionSignature
from .signatures import SIGNATURES, Signature
from .signatures.signature import narrowed
from .trials import Budget, Progress, Trial, smallest, sweep
from .verdict import answered, check_usable, finding_of, report_of

_SHARE_OF_SWEEP = 0.65  # share of the time; diagnosis and shrinking take the rest


def conform(
    fn: Operator,
    *,
    signature: str | Signature | SelectionSignature,
    without: Sequence[str] = (),
    examples: int = 150,
    seconds: float = 45.0,
    seed: int = 0,
    device: str = "cpu",
    time_limit: float = 10.0,
    require: Sequence[str] = (),
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Try an attention operator on many batches, and say what is wrong with it; or one that selects
    keys, on many scores.

    The operator runs in a process of its own. Its results are compared with float64 attention and,
    if they differ, with attention that is wrong in known ways: the report names the fault.

    Parameters
    ----------
    fn : callable or str
        Operator, or ``"module:function"``, which only the other process imports.
    signature : str, Signature or SelectionSignature
        Calling convention: one of `SIGNATURES` or `SELECTION_SIGNATURES`, or an adapter; as a str
        also ``"module:adapter"``.
    without : names
        Abilities of the signature that the operator does not claim: fields of `Features` or
        `SelectionFeatures`, and dtypes and layouts. Otherwise, accepting such an argument without
        effect is a finding.
    examples : int
        Number of cases besides those at the edges.
    seconds : float
        Approximate total time; cases at the edges always run.
    seed : int
        Seed of the cases: equal seeds give equal cases, as far as time allows.
    device : str
        Device of the tensors, as torch names it.
    time_limit : float
        Seconds that a call may take.
    require : sequence of str
        Ids of invariants that must be decided for a proof, see `cpattn_proof.require`.
    progress : function of the number done, the number of all and the current work

    Returns
    -------
    Report
        Findings have the names of `FAULTS` and `SELECTION_FAULTS` as their kinds. The verdict is
        "not judged" (exit code 2) if nothing is wrong but fewer than half of the cases were
        answered, or a required invariant was not checked.

    Raises
    ------
    NotUsable
        If the operator cannot be imported, or answers no case.
    ValueError
        If a number is not positive, or `without` or `require` has an unknown name.

    Examples
    --------
    >>> import cpattn
    >>> from cpattn_proof import conform
    >>> def forgets_windows(q, k, v, *, window=None, **options):
    ...     return cpattn.paged_attention(q, k, v, **options)
    >>> report = conform(forgets_windows, signature="cpattn", examples=0, seconds=3)
    >>> [finding.kind for finding in report.findings]
    ['window-ignored']
    """
    begin = time.monotonic()
    _check(examples=examples, seconds=seconds, time_limit=time_limit)
    if require:
        requiring(Report("conform", ""), require)  # refuses unknown ids before any trial
    chosen = narrowed(_signature(signature), without)
    subject = fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__)
    budget = Budget(examples, begin + seconds * _SHARE_OF_SWEEP, seed)
    with Child(fn, chosen, device, time_limit) as child:
        report = _conform(subject, child, chosen, budget, begin + seconds, progress)
    report = replace(report, seconds=time.monotonic() - begin)
    return requiring(report, require) if require else report


def _conform(
    subject: str, child: Child, signature: Signature | SelectionSignature, budget: Budget,
    until: float, progress: Progress,
) -> Report:  # fmt: skip
    """Try cases, diagnose faults, and find the smallest case of each fault."""
    kind = signature.kind
    edges = list(kind.edge_cases(signature.features))

    def attempt(case: Any) -> Trial:
        return kind.judge(child.run(case), signature)

    trials = sweep(attempt, edges, kind.cases(signature.features, None), budget, progress)
    check_usable(subject, trials)
    progress(len(trials), None, "diagnosing")
    rest = replace(budget, until=until)
    findings = []
    for diagnosis in diagnose(trials):
        progress(len(trials), None, f"making a case of {diagnosis.fault.name} smaller")
        known = sorted(diagnosis.trials, key=lambda trial: trial.case.size)
        others = kind.cases(signature.features, known[0].case)
        least = smallest(attempt, others, known, diagnosis.shown_by, rest)
        findings.append(_finding(subject, diagnosis, least, trials))
    facts = {"signature": signature.name, "seed": budget.seed, "edges": len(edges)}
    covers = kind.covers(answered(trials))
    return report_of(subject, trials, findings, covers, kind.reasons, facts)


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        least = "at least 0" if name == "examples" else "above 0"
        if not (value >= 0 if name == "examples" else 0 < value < float("inf")):
            raise ValueError(f"conform: {name} must be {least}, got {value}")


def _signature(
    signature: str | Signature | SelectionSignature,
) -> Signature | SelectionSignature:
    if isinstance(signature, str) and ":" in signature:
        with redirect_stdout(sys.stderr):  # standard output is for the report
            signature = load(signature, "a signature of your own must be named MODULE:ADAPTER")
    if isinstance(signature, str):
        known: dict[str, Signature | SelectionSignature] = {**SIGNATURES, **SELECTION_SIGNATURES}
        if signature not in known:
            raise NotUsable(
                f"conform: signature must be one of {', '.join(known)} or MODULE:ADAPTER, "
                f"got {signature!r}"
            )
        return known[signature]
    if not isinstance(signature, Signature | SelectionSignature):
        raise NotUsable(
            "conform: signature must be a name or a cpattn_proof.conformance.Signature, "
            f"got {type(signature).__name__}"
        )
    return signature


def _finding(subject: str, diagnosis: Diagnosis, least: Trial, trials: Sequence[Trial]) -> Finding:
    concerned = [t for t in trials if t in diagnosis.trials or diagnosis.shown_by(t)]
    said, then = least.said(), ""
    for name, count in diagnosis.contradicted.items():
        then = f"; {name} explains it, but not why {count} cases came out right"
    details = {
        "oracle": least.kind.told(diagnosis.oracle or least.kind.right),
        "also_explained_by": diagnosis.also, "contradicted": diagnosis.contradicted,
        "cases": len(concerned), "only_when": _only_when(concerned, trials),
    }  # fmt: skip
    found = finding_of(subject, diagnosis.fault, least, trials, len(concerned), said)
    return replace(
        found, what=found.what + then, picture=least.picture(), details={**found.details, **details}
    )


def _only_when(wrong: Sequence[Trial], trials: Sequence[Trial]) -> dict[str, object]:
    """Return the values that all wrong cases share, and some correct case lacks."""
    right = [trial.case for trial in trials if trial.verdict == "right"]
    found: dict[str, object] = {}
    for name in (field.name for field in fields(trials[0].case) if field.name != "seed"):
        values = {getattr(trial.case, name) for trial in wrong}
        if len(values) == 1 and any(getattr(case, name) not in values for case in right):
            value = values.pop()
            found[name] = list(value) if isinstance(value, tuple) else value
    return found
