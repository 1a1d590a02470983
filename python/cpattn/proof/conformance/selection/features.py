# SPDX-License-Identifier: Apache-2.0
"""How operators that select keys are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ..forms import WrongForm
from ..numbers import Array


class SelectionAnswer(NamedTuple):
    """What an operator selected, in one form.

    Attributes
    ----------
    indices : tensor [rows, topk] of integers
        Positions among the candidates of a row, in any order; -1 behind the last.
    if_confused : tensor [rows, topk], optional
        What `indices` would be if the operator had taken positions of a sequence for those of
        a part of it, or the other way round.
    """

    indices: Any
    if_confused: Any = None


@dataclass(frozen=True)
class SelectionFeatures:
    """What calls of a signature can say.

    Attributes
    ----------
    starts : bool
        Rows whose candidates begin at other columns than 0.
    empty : bool
        Rows without candidates.
    high : bool
        Scores outside of a row's candidates that are larger than theirs.
    low : bool
        Scores of candidates below the numbers of float16, and -inf.
    nan : bool
        Scores of candidates that are NaN, which count as -inf.
    ranks : bool
        Keys that are dealt out to ranks.
    """

    starts: bool = False
    empty: bool = True
    high: bool = True
    low: bool = True
    nan: bool = True
    ranks: bool = False


@dataclass(frozen=True)
class SelectionResult:
    """What came of a case: "answered", or why not in `message`."""

    case: Any
    status: str
    indices: Array | None = None
    if_confused: Array | None = None
    message: str = ""


@dataclass(frozen=True)
class SelectionSignature:
    """How to try an operator that selects keys.

    Attributes
    ----------
    name : str
        As `conform` is given it.
    features : SelectionFeatures
    call : function of the operator, a case and a device, which returns a `SelectionAnswer`
    shared : bool
        Whether all rows have the same scores, of which they see some.
    """

    name: str
    features: SelectionFeatures
    call: Callable[[Any, Any, str], SelectionAnswer]
    shared: bool = False

    def answer(self, fn: Any, case: Any, device: str) -> SelectionResult:
        """Call an operator on a case, and look at the form of what it returns."""
        answer = self.call(fn, case, device)
        indices = integers_of(answer.indices, len(case.lengths), case.topk)
        confused = answer.if_confused
        if confused is not None:
            confused = integers_of(confused, len(case.lengths), case.topk)
        return SelectionResult(case, "answered", indices, confused)

    def failed(self, case: Any, status: str, message: str) -> SelectionResult:
        """What stands for an answer."""
        return SelectionResult(case, status, message=message)


def narrowed(signature: SelectionSignature, without: Sequence[str]) -> SelectionSignature:
    """The signature of an operator that does not do some of what could be said by it."""
    features = signature.features
    can = [field.name for field in fields(features) if getattr(features, field.name)]
    for name in without:
        if name not in can:
            raise ValueError(f"conform: without must be of {', '.join(can)}, got {name!r}")
        features = replace(features, **{name: False})
    return replace(signature, features=features)


def integers_of(x: Any, rows: int, topk: int) -> Array:
    """int64, of a torch or NumPy tensor of integers; another number of columns is for the judge."""
    found = x.detach().cpu().numpy() if hasattr(x, "detach") else x
    is_array = isinstance(found, np.ndarray)
    if not is_array or found.dtype.kind not in "iu" or found.ndim != 2 or len(found) != rows:
        got = f"{found.dtype} of shape {list(found.shape)}" if is_array else type(x).__name__
        raise WrongForm(f"indices must be integers of shape {[rows, topk]}, got {got}")
    return found.astype(np.int64)
