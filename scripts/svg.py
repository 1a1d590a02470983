# SPDX-License-Identifier: Apache-2.0
"""Boxes, lines and words as SVG, for light and dark pages."""

from __future__ import annotations

import textwrap
from xml.sax.saxutils import escape

WIDTH = 700
SIZE, LINE = 13, 17  # of words in pixels, and of a line of them
#: Of a character, in the widest of the fonts that may stand in.
CHARACTER = 0.56

STYLE = """
  .page { fill: #ffffff } .plain { fill: #f6f8fa } .warm { fill: #fff1d6 }
  .cool { fill: #ddecff } .green { fill: #dbf3df } .dot { fill: #0b63c7 }
  rect { stroke: #59636e } .page, .dot { stroke: none }
  rect.ring { fill: none; stroke: #0b63c7; stroke-width: 1.5 }
  .line { stroke: #59636e; fill: none } .dashed { stroke-dasharray: 4 3 }
  text { font: 13px Helvetica, Arial, "Liberation Sans", sans-serif; fill: #1f2328 }
  .bold { font-weight: bold } .soft { fill: #59636e } .head { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .plain { fill: #161b22 } .warm { fill: #4a3510 }
    .cool { fill: #12325c } .green { fill: #163d22 } .dot { fill: #6cb2ff }
    rect { stroke: #9198a1 } .page, .dot { stroke: none } rect.ring { stroke: #6cb2ff }
    .line { stroke: #9198a1 }
    text { fill: #f0f6fc } .soft, .head { fill: #a9b1ba }
  }
"""


class Picture:
    """Grows downwards; `finish` returns its text, which names the script that wrote it."""

    def __init__(
        self,
        title: str,
        description: str = "",
        *,
        style: str = "",
        patterns: str = "",
        script: str = "architecture",
    ) -> None:
        self.title = title
        self.description = description
        self.style = STYLE + style
        self.patterns = patterns
        self.script = script
        self.height = 0.0
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, kind: str = "plain") -> None:
        self.height = max(self.height, y + h)
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>'
        )

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "start", turn: int = 0
    ) -> None:
        """One line, whose baseline is at y."""
        self.height = max(self.height, y + 4)
        width = len(words) * SIZE * CHARACTER
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if turn == 0 and (left < 0 or left + width > WIDTH + 20):
            raise ValueError(f"{self.title}: no room for {words!r} at {x:g}, {y:g}")
        turned = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        named = f' class="{kind}"' if kind else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.parts.append(f"<text{named} {place}{turned}>{escape(words)}</text>")

    def paragraph(self, x: float, y: float, w: float, words: str, kind: str = "") -> float:
        """Wrapped words whose first line begins at y; returns where they end."""
        for line in textwrap.wrap(words, int(w / (SIZE * CHARACTER)), break_long_words=False):
            y += LINE
            self.text(x, y - 4, line, kind)
        return y

    def label(self, x: float, y: float, w: float, h: float, words: str, kind: str) -> None:
        """A box with words in its middle."""
        lines = words.split("\n")
        if max(map(len, lines)) * SIZE * CHARACTER > w + 4:
            raise ValueError(f"{self.title}: {words!r} does not fit into {w:g}")
        self.rect(x, y, w, h, kind)
        top = y + h / 2 - LINE * len(lines) / 2 + SIZE
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + i * LINE, line, anchor="middle")

    def line(self, *points: tuple[float, float], arrow: bool = False, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.height = max(self.height, *(y for _, y in points))
        kind = "line dashed" if dashed else "line"
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<polyline class="{kind}" points="{path}"{tip}/>')

    def finish(self) -> str:
        height = round(self.height + 10)
        tip = (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto"><path class="head" d="M0,0L10,5L0,10z"/></marker>'
            f"{self.patterns}</defs>"
        )
        described = f"\n<desc>{escape(self.description)}</desc>" if self.description else ""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                f'viewBox="0 0 {WIDTH} {height}" role="img">',
                f"<!-- Written by scripts/{self.script}.py. -->",
                f"<title>{escape(self.title)}</title>{described}",
                f"<style>{self.style}</style>",
                tip,
                f'<rect class="page" x="0" y="0" width="{WIDTH}" height="{height}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
