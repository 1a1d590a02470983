# SPDX-License-Identifier: Apache-2.0
"""Signatures of operators that select keys: of scores, of an indexer, and of a rank."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from ..forms import WrongForm
from ..numbers import Array
from .cases import SelectionCase, candidates_of, make_scores
from .features import SelectionAnswer, SelectionFeatures, SelectionSignature, integers_of

_DIM, _HEADS = 32, 2


def _tensor(x: Array, device: str) -> Any:
    import torch

    return torch.from_numpy(np.array(x)).to(device)


def _call_topk(fn: Any, case: SelectionCase, device: str) -> SelectionAnswer:
    """``fn(scores, lengths, topk)``, and ``row_starts=`` where rows do not begin at 0."""
    lengths = _tensor(np.asarray(case.lengths, np.int32), device)
    options = {}
    if case.starts:
        options["row_starts"] = _tensor(np.asarray(case.starts, np.int32), device)
    indices = fn(_tensor(make_scores(case), device), lengths, case.topk, **options)
    found = integers_of(indices, len(case.lengths), case.topk)
    if not case.starts:
        return SelectionAnswer(found)
    starts = np.asarray(case.starts)[:, None]
    return SelectionAnswer(found, np.where(found < 0, found, found - starts))


def _call_indexer(fn: Any, case: SelectionCase, device: str) -> SelectionAnswer:
    """``fn(q, k, weights, ks, ke, topk=)``; a head has the score, and the other none."""
    rows, scores = len(case.lengths), make_scores(case, shared=True)[0]
    q = np.zeros((rows, _HEADS, _DIM), np.float32)
    q[:, 0, 3] = q[:, 1, 5] = 1
    k = np.zeros((len(scores), _DIM), np.float32)
    k[:, 3], k[:, 5] = scores, -1  # of which relu leaves nothing
    weights = np.ones((rows, _HEADS), np.float32)
    starts = np.asarray(case.first_columns, np.int32)
    indices = fn(
        *(_tensor(x, device) for x in (q, k, weights, starts)),
        _tensor(starts + np.asarray(case.lengths, np.int32), device), topk=case.topk,
    )  # fmt: skip
    found = integers_of(indices, rows, case.topk)
    if not case.starts:
        return SelectionAnswer(found)
    return SelectionAnswer(found, np.where(found < 0, found, found - starts[:, None]))


def _call_ranks(fn: Any, case: SelectionCase, device: str) -> SelectionAnswer:
    """``fn(indices, dcp_rank=, dcp_size=, interleave_size=)`` of each rank: all of them together.

    It gets the top-k of a sequence, and returns the places of those that the rank has, among the
    keys of the rank.
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
    """What ranks selected, row by row, -1 behind the last; wider than `topk` if it is more."""
    rows = [np.concatenate(row) for row in zip(*parts, strict=True)]
    found = [row[row != -1] for row in rows]
    width = max(topk, *(len(row) for row in found))
    together = np.full((len(rows), width), -1, np.int64)
    for row, own in zip(together, found, strict=True):
        row[: len(own)] = own
    return together


#: By name.
SELECTION_SIGNATURES = MappingProxyType(
    {
        signature.name: signature
        for signature in (
            SelectionSignature("topk", SelectionFeatures(starts=True), _call_topk),
            SelectionSignature(
                "indexer_topk",
                SelectionFeatures(starts=True, high=False, low=False, nan=False),
                _call_indexer,
                True,
            ),
            SelectionSignature(
                "dcp_local_indices",
                SelectionFeatures(high=False, low=False, nan=False, ranks=True),
                _call_ranks,
            ),
        )
    }
)
