# SPDX-License-Identifier: Apache-2.0
"""Results of operators, and judgement of attention results by an oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .numbers import Array
from .oracle import Attended
from .switches import Switches
from .tolerances import FIT, allowed_lse, allowed_out


@dataclass(frozen=True)
class Result:
    """Outcome of a case: the answer of an operator, or the reason why there is none.

    Attributes
    ----------
    status : {"answered", "refused", "raised", "wrong-form", "crash", "hang"}
    out, lse : float64 arrays of the rows of sequences, or None
    indices, if_confused : int64 arrays, or None
        Fields of `SelectionAnswer`.
    message : str
        Reason why there is no answer, or the side effect.
    side_effect : {"", "changes-inputs", "new-keys-unwritten"}
        Forbidden change, or missing change, of the arguments by an operator that answered.
    """

    case: Any
    status: str
    out: Array | None = None
    lse: Array | None = None
    indices: Array | None = None
    if_confused: Array | None = None
    message: str = ""
    side_effect: str = ""


class Differences(NamedTuple):
    """Elements that differ by more than rounding explains."""

    out: Array  # [rows, heads, dim], bool
    lse: Array  # [rows, heads], bool; all False without LSE


def differences(result: Result, expected: Attended, slack: float = 1.0) -> Differences:
    """Compare a result with the oracle; `slack` times the usual tolerances are allowed."""
    case = result.case
    measures = (expected.num_keys, expected.score_size, case.head_dim, case.dtype)
    assert result.out is not None
    out = _differ(result.out, expected.out, slack * allowed_out(expected.magnitude, *measures))
    if result.lse is None:
        return Differences(out, np.zeros(expected.lse.shape, bool))
    bound = slack * allowed_lse(expected.lse, *measures)
    return Differences(out, _differ(result.lse, expected.lse, bound))


def fits(result: Result, wrong: Attended, channel: str, switches: Switches) -> bool:
    """Tell whether a wrong oracle gives the operator's outputs; with channel "lse", also its
    log-sum-exps."""
    lse = wrong.lse
    if switches.lse in ("free on empty", "any on empty") and result.lse is not None:
        any_number = np.isfinite(result.lse) | (switches.lse == "any on empty")
        lse = np.where((wrong.num_keys == 0) & any_number, result.lse, lse)
    found = differences(result, wrong._replace(lse=lse), FIT)
    return not (found.out.any() or (channel == "lse" and found.lse.any()))


def _differ(actual: Array, expected: Array, allowed: Array) -> Array:
    """Compare infinities and NaN first, then values."""
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(expected)
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        near = np.abs(actual - expected) <= np.nan_to_num(allowed, posinf=0)
    differ: Array = ~np.where(finite, near, same)
    return differ


def off_by(result: Result, expected: Attended, channel: str) -> str:
    """Describe the largest error of an answer, or its wrong infinite or NaN numbers."""
    actual, right = (result.out, expected.out) if channel == "out" else (result.lse, expected.lse)
    if actual is None:
        return "is missing"
    finite = np.isfinite(right)
    if np.isnan(actual).any():
        return "is NaN"
    if not np.isfinite(actual[finite]).all():
        return "is infinite"
    if np.isfinite(actual[~finite]).any():
        return "is finite where no key is seen"
    return f"is off by {np.max(np.abs(actual[finite] - right[finite]), initial=0.0):.3g}"
