# SPDX-License-Identifier: Apache-2.0
"""Parts of small plans of ranks, from which the bugs in this folder are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...findings import Report
from ...linting.linter import lint
from ..entry import Shipped, ZooEntry

Document = dict[str, Any]


def document(**parts: Any) -> Document:
    """Return a document with these parts."""
    return {"schema": "cpattn-plan/1", **parts}


def entry(
    bug: str,
    invariant: str,
    story: str,
    make: Callable[[bool], Document],
    kind: str = "issues",
    shipped: Shipped | None = None,
) -> ZooEntry:
    """Make the entry of a bug that the linter refutes; `make(mended)` returns its document."""

    def report(mended: bool) -> Report:
        return lint(make(mended), name=f"{bug}, {'mended' if mended else 'broken'}")

    repository, _, number = bug.partition("#")
    link = f"https://github.com/{repository}/{kind}/{number}"
    return ZooEntry(
        bug, link, "lint", invariant, story, lambda: report(False), lambda: report(True), shipped
    )


def rows(pieces: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """Return rows of a rank from pieces (request, position, count)."""
    return columns(("request", "position", "count"), pieces)


def columns(names: Sequence[str], lines: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """Return the columns of lines, by name."""
    table = list(lines)
    return {name: [line[i] for line in table] for i, name in enumerate(names)}


def local_length(tokens: int, rank: int, ranks: int, interleave: int = 1) -> int:
    """Count how many of the first `tokens` a rank keeps, if ranks take `interleave` in turn."""
    rounds, rest = divmod(tokens, ranks * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def decode_rows(lens: Sequence[int], queries: int = 1) -> dict[str, list[int]]:
    """Return rows of the last tokens of each sequence, which every rank has in decoding."""
    return rows((number, length - queries, queries) for number, length in enumerate(lens))


def decode_requests(lens: Sequence[int], queries: int = 1) -> list[dict[str, int]]:
    """Return requests whose last tokens are new."""
    return [{"prefix": length - queries, "extend": queries} for length in lens]
