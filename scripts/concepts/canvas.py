# SPDX-License-Identifier: Apache-2.0
"""A picture with a colour for each rank, and a hatching for what is cached."""

from __future__ import annotations

from collections.abc import Sequence

from svg import CHARACTER, SIZE, Picture

#: Of ranks: for light pages with dark words, and for dark pages with light ones.
LIGHT = ("#9ecbff", "#ffc680", "#a6e3b0", "#dcc2ff")
DARK = ("#1f5fae", "#8a5200", "#1d6f35", "#6f42b5")


def _colours(colours: Sequence[str]) -> str:
    return " ".join(f".r{rank} {{ fill: {colour} }}" for rank, colour in enumerate(colours))


STYLE = f"""
  {_colours(LIGHT)}
  .hatch {{ fill: url(#hatch); stroke: none }} .stroke {{ stroke: #59636e; stroke-width: 1.4 }}
  .grid {{ stroke: #ffffff; stroke-width: 1; fill: none }} .none {{ fill: none }}
  .small {{ font-size: 11px }} .mono {{ font-family: "Liberation Mono", Menlo, monospace }}
  .empty {{ fill: none; stroke-dasharray: 3 3 }} .mark {{ stroke: #1f2328; stroke-width: 2 }}
  @media (prefers-color-scheme: dark) {{
    {_colours(DARK)}
    .stroke {{ stroke: #a9b1ba }} .grid {{ stroke: #0d1117 }} .mark {{ stroke: #f0f6fc }}
  }}
"""
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="stroke" d="M0,0V6"/></pattern>'
)


class Canvas(Picture):
    """Draws what the pictures of concepts share."""

    def __init__(self, title: str, description: str) -> None:
        super().__init__(title, description, style=STYLE, patterns=HATCH, script="concept_pictures")

    def width_of(self, words: str) -> float:
        return len(words) * SIZE * CHARACTER

    def plate(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words in the middle of (x, y), readable on a hatching."""
        width = self.width_of(words) + 4
        self.rect(x - width / 2, y - 10, width, 20, "page")
        self.text(x, y + 4.5, words, kind, anchor="middle")

    def block(
        self, x: float, y: float, w: float, h: float, words: str, kind: str, *, bold: bool = False
    ) -> None:
        """A box with one line of words in its middle, where they have room."""
        if words and self.width_of(words) > w + 4:
            raise ValueError(f"{self.title}: {words!r} does not fit into {w:g}")
        self.rect(x, y, w, h, kind)
        if words:
            named = "bold" if bold else ""
            self.text(x + w / 2, y + h / 2 + 4.5, words, named, anchor="middle")

    def cached(self, x: float, y: float, w: float, h: float, words: str = "") -> None:
        """A hatched box."""
        self.rect(x, y, w, h, "plain")
        self.rect(x, y, w, h, "hatch")
        if words:
            self.plate(x + w / 2, y + h / 2, words)

    def brace(self, x: float, y: float, w: float, words: str, kind: str = "soft") -> None:
        """A bracket below what spans [x, x + w], and words below it."""
        self.line((x + 2, y), (x + 2, y + 6), (x + w - 2, y + 6), (x + w - 2, y))
        self.text(x + w / 2, y + 21, words, kind, anchor="middle")

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A closed shape."""
        self.height = max(self.height, *(y for _, y in points))
        corners = "L".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{corners}Z"/>')

    def triangle(
        self,
        x: float,
        y: float,
        cell: float,
        owners: Sequence[int],
        keys: Sequence[int],
        prefix: int,
    ) -> None:
        """The keys that each query sees, coloured by the rank that owns the query; those of the
        prefix are hatched."""
        start = 0
        while start < len(owners):
            stop = start
            points = [(x, y + start * cell)]
            while stop < len(owners) and owners[stop] == owners[start]:
                right = x + keys[stop] * cell
                points += [(right, y + stop * cell), (right, y + (stop + 1) * cell)]
                stop += 1
            self.path([*points, (x, y + stop * cell)], f"r{owners[start]}")
            start = stop
        wide, high = keys[-1] * cell, len(owners) * cell
        lines = [f"M{x:g},{y + i * cell:g}h{wide:g}" for i in range(1, len(owners))]
        lines += [f"M{x + j * cell:g},{y:g}v{high:g}" for j in range(1, keys[-1])]
        self.parts.append(f'<path class="grid" d="{"".join(lines)}"/>')
        if prefix:
            self.rect(x, y, prefix * cell, high, "hatch")
        self.rect(x, y, wide, high, "none")
