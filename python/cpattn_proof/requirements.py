# SPDX-License-Identifier: Apache-2.0
"""Invariants that a caller requires a tool to decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .findings import Report
from .invariants import INVARIANTS


def require(report: Report, ids: str | Iterable[str]) -> Report:
    """Require that a report decided some invariants; otherwise it is not proved.

    Parameters
    ----------
    report : Report
        Report of any tool.
    ids : str or iterable of str
        Ids of `INVARIANTS`, as strings that may contain commas.

    Returns
    -------
    Report
        The report with `Report.required`. Its exit code is 2 if nothing is refuted and one of `ids`
        is not among `checked`.

    Raises
    ------
    ValueError
        If an id is not in `INVARIANTS`, or there is no id.

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
