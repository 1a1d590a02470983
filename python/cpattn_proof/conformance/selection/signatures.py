# SPDX-License-Identifier: Apache-2.0
"""Signatures of operators that select keys: from scores, from an indexer, and on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..forms import WrongForm
from ..judgement import Result
from ..numbers import Array
from ..trials import Kind
from .cases import SelectionCase, SelectionFeatures, candidates_of, make_scores
from .trials import SELECTION

_DIM, _HEADS = 32, 2


class SelectionAnswer(NamedTuple):
    """Selection in a standard form.

    Attributes
    ----------
    indices : tensor [rows, topk] of integers
        Positions among the candidates of a row, in any order; -1 after the last.
    if_confused : tensor [rows, topk], optional
        `indices` under the assumption that the operator confuses positions of a sequence with those
        of a part of it.
    """

    indices: Any
    if_confused: Any = None


@dataclass(frozen=True)
class SelectionSignature:
    """Signature of operators that select keys: calls one and reads its answer.

    Attributes
    ----------
    name : str
        Name for `conform`.
    features : SelectionFeatures
    call : function of the operator, a case and a device, which returns a `SelectionAnswer`
    shared : bool
        Whether all rows have the same scores, of which they see some.
    """

    name: str
    features: SelectionFeatures
    call: Callable[[Any, Any, str], SelectionAnswer]
    shared: bool = False
    kind: ClassVar[Kind] = SELECTION

    def answer(self, fn: Any, case: Any, device: str) -> Result:
        """Call an operator on a case, and check the form of its result."""
        indices, confused = self.call(fn, case, device)
        form = (len(case.lengths), case.topk)
        return Result(
            case, "answered", indices=integers_of(indices, *form),
            if_confused=None if confused is None else integers_of(confused, *form),
        )  # fmt: skip


def integers_of(x: Any, rows: int, topk: int) -> Array:
    """Return a torch or NumPy tensor of integers as int64; the judge checks its columns."""
    found = x.detach().cpu().numpy() if hasattr(x, "detach") else x
    is_array = isinstance(found, np.ndarray)
    if not is_array or found.dtype.kind not in "iu" or found.ndim != 2 or len(found) != rows:
        got = f"{found.dtype} of shape {list(found.shape)}" if is_array else type(x).__name__
        raise WrongForm(f"indices must be integers of shape {[rows, topk]}, got {got}")
    return found.astype(np.int64)


def _tensor(x: Array, device: str) -> Any:
    import torch

    return torch.from_numpy(np.array(x)).to(device)


def _among_candidates(indices: Any, case: SelectionCase) -> SelectionAnswer:
    """Return the answer, and its meaning if it had columns."""
    found = integers_of(indices, len(case.lengths), case.topk)
    starts = np.asarray(case.first_columns)[:, None]
    return SelectionAnswer(found, np.where(found < 0, found, found - starts))


def _call_topk(fn: Any, case: SelectionCase, device: str) -> SelectionAnswer:
    """Call ``fn(scores, lengths, topk)``, with ``row_starts=`` if rows do not begin at 0."""
    lengths = _tensor(np.asarray(case.lengths, np.int32), device)
    options = {}
    if case.starts:
        options["row_starts"] = _tensor(np.asarray(case.starts, np.int32), device)
    scores = _tensor(make_scores(case), device)
    return _among_candidates(fn(scores, lengths, case.topk, **options), case)


def _call_indexer(fn: Any, case: SelectionCase, device: str) -> SelectionAnswer:
    """Call ``fn(q, k, weights, ks, ke, topk=)``; one head has the score, the other none."""
    rows, scores = len(case.lengths), make_scores(case, shared=True)[0]
    q = np.zeros((rows, _HEADS, _DIM), np.float32)
    q[:, 0, 3] = q[:, 1, 5] = 1
    k = np.zeros((len(scores), _DIM), np.float32)
    k[:, 3], k[:, 5] = scores, -1  # relu turns these into 0
    weights = np.ones((rows, _HEADS), np.float32)
    starts = np.asarray(case.first_columns, np.int32)
    ends = starts + np.asarray(case.lengths, np.int32)
    tensors = (_tensor(x, device) for x in (q, k, weights, starts, ends))
    return _among_candidates(fn(*tensors, topk=case.topk), case)


def _call_ranks(fn: Any, case: SelectionCase, device: str) -> SelectionAnswer:
    """Call ``fn(indices, dcp_rank=, dcp_size=, interleave_size=)`` for each rank, and join results.

    The operator gets the top-k of a sequence, and returns the places of the rank's own indices
    among the keys of the rank.
    """
    chosen = np.full((len(case.lengths), case.topk), -1, np.int32)
    for row, own in zip(chosen, candidates_of(case, make_scores(case)), strict=True):
        best = np.argsort(-own, kind="stable")[: case.topk]
        row[: len(best)] = best
    parts: list[Array] = []
    for rank in range(case.ranks):
        local = fn(
            _tensor(chosen, device), dcp_rank=rank, dcp_size=case.ranks,
            interleave_size=case.interleave,
        )  # fmt: skip
        found = integers_of(local, *chosen.shape)
        if found.shape != chosen.shape:
            wanted, got = list(chosen.shape), list(found.shape)
            raise WrongForm(f"indices of a rank must have shape {wanted}, got {got}")
        parts.append(found)
    size = case.interleave
    positions = [
        np.where(p < 0, p, (p // size * case.ranks + rank) * size + p % size)
        for rank, p in enumerate(parts)
    ]
    return SelectionAnswer(_together(positions, case.topk), _together(parts, case.topk))


def _together(parts: list[Array], topk: int) -> Array:
    """Join selections of ranks by row, -1 after the last; wider than `topk` if needed."""
    rows = [np.concatenate(row) for row in zip(*parts, strict=True)]
    found = [row[row != -1] for row in rows]
    width = max(topk, *(len(row) for row in found))
    together = np.full((len(rows), width), -1, np.int64)
    for row, own in zip(together, found, strict=True):
        row[: len(own)] = own
    return together


_SIGNATURES = (
    SelectionSignature("topk", SelectionFeatures(starts=True), _call_topk),
    SelectionSignature(
        "indexer_topk", SelectionFeatures(starts=True, high=False, low=False, nan=False),
        _call_indexer, shared=True,
    ),
    SelectionSignature(
        "dcp_local_indices", SelectionFeatures(high=False, low=False, nan=False, ranks=True),
        _call_ranks,
    ),
)  # fmt: skip

#: Signatures by their names in `conform`.
SELECTION_SIGNATURES = MappingProxyType({signature.name: signature for signature in _SIGNATURES})
