# SPDX-License-Identifier: Apache-2.0
"""Typical faults of partial results that ranks compute over each other's keys and merge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..conformance.faults import FAULTS, Fault
from ..conformance.numbers import Array
from ..conformance.oracle import Parts
from ..conformance.switches import RIGHT, Switches
from .rows import Rows

_LN2 = math.log(2)

_MISSING = Fault(
    "part-missing", "COV", "leaves out the keys of a rank",
    "Count the steps: P ranks have P parts, their own among them, and P - 1 messages.",
)  # fmt: skip
_TWICE = Fault(
    "part-twice", "COV", "counts the keys of a rank twice",
    "Count the steps, and see that each attends to what it has received, not to what was sent.",
)  # fmt: skip
_ALONE = Fault(
    "own-part-only", "COV", "gives the part of a rank's own keys as the whole result",
    "Merge what each step adds into what is returned.",
)  # fmt: skip


class Wrong(NamedTuple):
    """Wrong oracle: parts of each sequence, and their merge."""

    fault: Fault
    parts: list[Parts]
    switches: Switches = RIGHT
    detail: str = ""


def oracles(rows: Rows, ranks: int) -> Iterator[Wrong]:
    """Yield wrong oracles, the likeliest first; none if every rank has all keys."""
    if ranks < 2 or any((owner < 0).any() for owner in rows.key_rank):
        return
    rings = [_ring(rows, ranks, direction) for direction in (1, -1)][: 2 if ranks > 2 else 1]
    nan = [
        replace(RIGHT, nan_of_empty_part=which)
        for which in ("some", "any", "first", "later", "masked")
    ]
    for ring in rings:
        yield Wrong(FAULTS["merge-swapped"], ring, replace(RIGHT, merge_swapped=True))
        for factor in (1 / _LN2, _LN2):
            yield Wrong(FAULTS["merge-wrong-base"], ring, replace(RIGHT, merge_factor=factor))
        for switches in nan:
            yield Wrong(FAULTS["merge-nan"], ring, switches)
    yield Wrong(_ALONE, [parts[:1] for parts in rings[0]])
    for step in range(ranks):
        said = f"step {step} of the ring" if step else "its own keys"
        yield Wrong(_MISSING, [_without(parts, step) for parts in rings[0]], detail=said)
        yield Wrong(_TWICE, [[*parts, parts[step]] for parts in rings[0]], detail=said)
    for rank in range(ranks):
        said = f"keys of rank {rank}"
        mine = [owner == rank for owner in rows.key_rank]
        yield Wrong(_MISSING, [[~keys] for keys in mine], detail=said)
        yield Wrong(_TWICE, [[np.ones_like(keys), keys] for keys in mine], detail=said)


def _ring(rows: Rows, ranks: int, direction: int) -> list[Parts]:
    """Return the keys of each step, for each row's rank: its own, then its neighbours'."""
    found: list[Parts] = []
    ends = np.cumsum(rows.batch.case.q_lens)
    for owner, begin, end in zip(rows.key_rank, [0, *ends[:-1]], ends, strict=True):
        rank = rows.rank[begin:end, None]
        found.append([owner == (rank - direction * step) % ranks for step in range(ranks)])
    return found


def _without(parts: Parts, step: int) -> list[Array]:
    return [part for i, part in enumerate(parts) if i != step]
