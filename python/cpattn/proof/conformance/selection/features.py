# SPDX-License-Identifier: Apache-2.0
"""How operators that select keys are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

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
    ranks : bool
        Keys that are dealt out to ranks.
    """

    starts: bool = False
    empty: bool = True
    high: bool = True
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
        indices = _integers(answer.indices)
        if indices is None or indices.ndim != 2 or len(indices) != len(case.lengths):
            shape = list(getattr(answer.indices, "shape", ()))
            wanted = [len(case.lengths), case.topk]
            said = f"indices must be integers of shape {wanted}, got {shape or 'no tensor'}"
            return self.failed(case, "wrong-form", said)
        return SelectionResult(case, "answered", indices, _integers(answer.if_confused))

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


def _integers(x: Any) -> Array | None:
    """int64, of a torch or NumPy tensor of integers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu":
        return None
    return x.astype(np.int64)
