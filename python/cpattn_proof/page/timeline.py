# SPDX-License-Identifier: Apache-2.0
"""Timeline of ranks, as shapes of a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST = 4000  # stretches in a page; the longest are kept
_WIDTH, _ROW, _GAP = 1000, 18, 6


@dataclass(frozen=True)
class Stretch:
    """Period of a rank, in seconds, in which it computes, waits, or its link transfers."""

    rank: int
    name: str
    begin: float
    end: float
    kind: str
    place: str = ""


def drawing(stretches: Sequence[Stretch]) -> dict[str, Any] | None:
    """Return rectangles for the template, rank by rank; None if there is nothing to draw."""
    shown = sorted(stretches, key=lambda one: one.begin - one.end)[:_MOST]
    end = max((one.end for one in stretches), default=0.0)
    if end <= 0:
        return None
    ranks = sorted({one.rank for one in shown})
    tops = {rank: i * (2 * _ROW + _GAP) for i, rank in enumerate(ranks)}
    shapes = [
        {
            "x": round(_WIDTH * one.begin / end, 2),
            "width": round(max(_WIDTH * (one.end - one.begin) / end, 0.5), 2),
            "y": tops[one.rank] + (_ROW if one.kind == "transfer" else 0),
            "kind": one.kind,
            "title": f"rank {one.rank}: {one.name}, {1e3 * (one.end - one.begin):.3f} ms"
            + (f", {one.place}" if one.place else ""),
        }
        for one in sorted(shown, key=lambda one: (one.rank, one.begin))
    ]
    return {
        "shapes": shapes,
        "ranks": [{"name": rank, "y": tops[rank] + _ROW * 0.75} for rank in ranks],
        "height": len(ranks) * (2 * _ROW + _GAP),
        "row": _ROW - 2,
        "milliseconds": 1e3 * end,
        "left_out": len(stretches) - len(shown),
    }
