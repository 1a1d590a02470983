# SPDX-License-Identifier: Apache-2.0
"""Bars of text that show ranges on a line of tokens, keys or bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WIDTH = 48
MOST_LINES = 8


class Picture(str):
    """Bars as text, with their numbers for other drawings."""

    bars: Mapping[str, Any] | None = None


@dataclass
class Bars:
    """Lines of one scale, with a mark below them.

    Attributes
    ----------
    begin, end : int
        Begin and end of the scale.
    mark : int, optional
        Place that an arrow points at.
    """

    begin: int
    end: int
    mark: int | None = None
    _lines: list[tuple[str, str, str]] = field(default_factory=list)
    _ranges: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, ranges: Sequence[tuple[int, int]] | np.ndarray) -> None:
        """Add a line with half-open ranges, labelled by first and last numbers."""
        known = np.clip(np.asarray(ranges, np.int64).reshape(-1, 2), self.begin, self.end)
        known = known[known[:, 0] < known[:, 1]]
        known = known[np.lexsort((known[:, 1], known[:, 0]))]
        changes = np.zeros(self.width + 1, np.int64)
        np.add.at(changes, self._cells(known[:, 0]), 1)
        np.add.at(changes, self._cells(known[:, 1] - 1) + 1, -1)
        cells = np.where(np.cumsum(changes)[:-1] > 0, "#", ".")
        shown = [(begin, end) for begin, end in known.tolist()]
        texts = [f"{b}-{e - 1}" if e - b > 1 else f"{b}" for b, e in shown[:4]]
        rest = [f"and {len(shown) - 4} more"] if len(shown) > 4 else []
        self._lines.append((name, "".join(cells), " ".join([*texts, *rest]) or "none"))
        self._ranges.append({"name": name, "ranges": shown})

    @property
    def width(self) -> int:
        return max(min(WIDTH, self.end - self.begin), 1)

    def _cells(self, numbers: np.ndarray) -> np.ndarray:
        # In floating point, as bytes times cells may exceed 64 bits.
        cells = (numbers - self.begin) * float(self.width) // max(self.end - self.begin, 1)
        return np.minimum(cells.astype(np.int64), self.width - 1)

    def _cell(self, number: int) -> int:
        return int(self._cells(np.array([number]))[0])

    def picture(self, note: str = "") -> Picture:
        """Return the lines, only those around the mark if there are many, and a note below."""
        lines, ranges = self._lines, self._ranges
        if not lines:
            return Picture()
        hidden = len(lines) - MOST_LINES
        if hidden > 0:
            marked = [i for i, line in enumerate(lines) if self._is_marked(line[1])]
            middle = marked[0] if marked else 0
            begin = min(max(middle - MOST_LINES // 2, 0), hidden)
            lines = lines[begin : begin + MOST_LINES]
            ranges = ranges[begin : begin + MOST_LINES]
        names = max((len(name) for name, _, _ in lines), default=0)
        texts = [f"{name:<{names}}  {bar}  {ranges}" for name, bar, ranges in lines]
        if self.mark is not None and self.begin <= self.mark < self.end:
            texts.append(f"{'':<{names}}  {' ' * self._cell(self.mark)}^ {self.mark}")
        if hidden > 0:
            texts.append(f"({hidden} more lines like these)")
        picture = Picture("\n".join([*texts, note] if note else texts))
        picture.bars = {
            "begin": self.begin,
            "end": self.end,
            "mark": self.mark,
            "lines": ranges,
            "note": note,
        }
        return picture

    def _is_marked(self, bar: str) -> bool:
        inside = self.mark is not None and self.begin <= self.mark < self.end
        return inside and bar[self._cell(self.mark or 0)] == "#"


def ranges_of(numbers: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Return numbers as half-open ranges.

    >>> ranges_of([0, 1, 2, 7])
    [(0, 3), (7, 8)]
    """
    values = np.unique(np.asarray(numbers, np.int64))
    if not len(values):
        return []
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(values, breaks)]


def side_by_side(columns: Sequence[tuple[str, Sequence[str]]], mark: int | None) -> str:
    """Print lists beside each other and mark a line."""
    length = max((len(lines) for _, lines in columns), default=0)
    begin = max((mark or 0) - 2, 0)
    shown = range(begin, min(length, begin + 5))
    cells = [
        [name, *(lines[i] if i < len(lines) else "(none)" for i in shown)]
        for name, lines in columns
    ]
    widths = [max(map(len, column)) for column in cells]
    heads = ["  ", *(f"{'>' if i == mark else ' '} " for i in shown)]
    return "\n".join(
        head
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for head, row in zip(heads, zip(*cells, strict=True), strict=True)
    )
