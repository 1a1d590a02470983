# SPDX-License-Identifier: Apache-2.0
"""Invariants that a caller requires a tool to decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .findings import Report
from .invariants import INVARIANTS


def require(report: Report, ids: str | Iterable[str]) -> Report:
    """Demand that a report decided some invariants: it is not proved where it did not.

    Parameters
    ----------
    report : Report
        Report of any tool.
    ids : str or iterable of str
        Ids of `INVARIANTS`, or these with commas between them.

    Returns
    -------
    Report
        With `Report.required`. Where nothing is refuted, and one of `ids` is not among `checked`,
        its exit code is 2.

    Raises
    ------
    ValueError
        If an id is none of `INVARIANTS`, or there is none.

    Examples
    --------
    >>> require(Report("lint", "plan", checked=("OWN",)), "OWN,COV").verdict
    'not judged'
    """
    wanted = tuple(ids.split(",") if isinstance(ids, str) else ids)
    unknown = next((repr(one)[:60] for one in wanted if one not in INVARIANTS), None)
    if unknown is not None or not wanted:
        raise ValueError(
            f"require: ids must be of {', '.join(INVARIANTS)}, got {unknown or 'none'}"
        )
    return replace(report, required=tuple(dict.fromkeys((*report.required, *wanted))))
