# SPDX-License-Identifier: Apache-2.0
"""Conversion of lists of tokens and slots to runs, the form in documents."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..intervals import Ints, ints, offsets


def row_runs(request: Any, position: Any, step: int = 1) -> dict[str, list[int]]:
    """Return the columns ``rows`` of tokens in the order of a rank's rows.

    >>> row_runs([0, 0, 1], [4, 5, 0])
    {'request': [0, 1], 'position': [4, 0], 'count': [2, 1], 'step': [1, 1]}
    """
    request, position = ints(request), ints(position)
    if not len(position):
        return {"request": [], "position": [], "count": []}
    begins = _breaks(np.diff(request) != 0, np.diff(position) != step)
    return {
        "request": request[begins].tolist(),
        "position": position[begins].tolist(),
        "count": np.diff(np.append(begins, len(position))).tolist(),
        "step": [step] * len(begins),
    }


def write_runs(request: Any, position: Any, slot: Any) -> dict[str, list[int]]:
    """Return the columns ``writes`` of tokens and slots; slots below 0 are not written."""
    request, position, slot = (ints(values) for values in (request, position, slot))
    real = slot >= 0
    request, position, slot = request[real], position[real], slot[real]
    if not len(slot):
        return {"request": [], "position": [], "count": [], "slot": []}
    begins = _breaks(np.diff(request) != 0, np.diff(position) != 1, np.diff(slot) != 1)
    return {
        "request": request[begins].tolist(),
        "position": position[begins].tolist(),
        "count": np.diff(np.append(begins, len(slot))).tolist(),
        "slot": slot[begins].tolist(),
    }


def _breaks(*changes: NDArray[np.bool_]) -> Ints:
    """Return the begins of runs; flags between neighbours mark where a new run begins."""
    return ints([0, *(np.flatnonzero(np.logical_or.reduce(changes)) + 1)])


def tokens_of(flat: Any, extend_lens: Any, prefix_lens: Any) -> tuple[Ints, Ints]:
    """Return request and position of tokens that are numbered over the whole batch."""
    flat, base = ints(flat), offsets(ints(extend_lens))
    request = np.searchsorted(base, flat, side="right") - 1
    return request, flat - base[request] + ints(prefix_lens)[request]


def parts_sent(rows: Ints, plan: Any) -> list[Ints]:
    """Return the rows that a plan sends to each rank."""
    return np.split(rows[ints(plan.send_indices)], offsets(ints(plan.send_counts))[1:-1])


def requests_of(extend_lens: Any, prefix_lens: Any) -> list[dict[str, int]]:
    """Return the requests of a document."""
    pairs = zip(ints(prefix_lens).tolist(), ints(extend_lens).tolist(), strict=True)
    return [{"prefix": prefix, "extend": extend} for prefix, extend in pairs]
