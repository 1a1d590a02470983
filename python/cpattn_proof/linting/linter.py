# SPDX-License-Identifier: Apache-2.0
"""All checks of a plan, and their report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..findings import Finding, Report
from ..invariants import INVARIANTS
from . import shrinking
from .checks import CHECKS, Check
from .document import plain, read, validated
from .model import Absent, Plan, Undecided


def lint(
    plan: Mapping[str, Any] | str | Path, *, name: str | None = None, shrink: bool = True
) -> Report:
    """Refute or prove the plans of all ranks.

    Parameters
    ----------
    plan : mapping, or the path of a file
        A document ``cpattn-plan/1``, in Python also with integers and arrays of NumPy. The modules
        in ``cpattn_proof.linting.adapters`` make one from plans of engines and libraries.
    name : str, optional
        Name in the report; default: the path, the document's ``name``, or "plan".
    shrink : bool
        Whether each finding includes the smallest found part of the document with the same fault,
        as ``details["smaller"]``.

    Returns
    -------
    Report
        A finding for each kind of fault. ``not_checked`` lists what the document has no data for.

    Raises
    ------
    NotUsable
        If the document is invalid: the message names the place, the rule and the value.

    Examples
    --------
    >>> rows = [{"request": [0], "position": [p], "count": [2]} for p in (0, 1)]
    >>> plan = {"requests": [{"extend": 3}], "ranks": [{"rows": part} for part in rows]}
    >>> report = lint(plan | {"schema": "cpattn-plan/1"})
    >>> report.findings[0].what
    'position 1 of request 0 is on 2 ranks, not 1'
    """
    begin = time.perf_counter()
    if isinstance(plan, (str, Path)):
        document, name = read(Path(plan)), name or str(plan)
    else:
        own = plan.get("name") if isinstance(plan, Mapping) else None
        name = name or (own if isinstance(own, str) and own.isprintable() else "plan")
        document = validated(plain(plan), name)
    findings, checked, missing = _judged(Plan(document, name), CHECKS)
    if shrink:
        findings = [_with_smaller(found, document) for found in findings]
    seconds = time.perf_counter() - begin
    return Report(
        "lint", name, tuple(findings), tuple(checked), missing, seconds,
        facts={part: len(document.get(part, ())) for part in ("ranks", "requests", "transfers")},
    )  # fmt: skip


def _judged(plan: Plan, checks: Iterable[Check]) -> tuple[list[Finding], list[str], dict[str, str]]:
    """Return findings, decided ids, and the undecided parts of each id.

    An id counts as decided by its present parts, unless one of them is too large to judge.
    """
    findings: list[Finding] = []
    decided: set[str] = set()
    left: set[str] = set()
    reasons: dict[str, dict[str, list[str]]] = {}  # parts by id, then by reason
    for check in checks:
        try:
            findings += check.run(plan)
            decided.add(check.invariant)
        except Absent as reason:
            if isinstance(reason, Undecided):
                left.add(check.invariant)
            reasons.setdefault(check.invariant, {}).setdefault(str(reason), []).append(check.part)
    missing = {
        id: "; ".join(f"{', '.join(parts)}: {why}" for why, parts in reasons[id].items())
        for id in INVARIANTS
        if id in reasons
    }
    decided -= left - {found.invariant for found in findings}
    return findings, [id for id in INVARIANTS if id in decided], missing


def _with_smaller(found: Finding, document: Mapping[str, Any]) -> Finding:
    """Add a smaller document to the details of a finding."""
    checks = [check for check in CHECKS if check.invariant == found.invariant]

    def shows(candidate: dict[str, Any]) -> bool:
        findings, _, _ = _judged(Plan(candidate, "smaller"), checks)
        return any(one.kind == found.kind for one in findings)

    smaller = shrinking.shrunk(document, found.invariant, shows)
    return replace(found, details={**found.details, "smaller": smaller})
