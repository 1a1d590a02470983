# SPDX-License-Identifier: Apache-2.0
"""Page of reports: verdicts, findings with pictures, a timeline, and undecided invariants."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..findings import Finding, Report
from ..invariants import INVARIANTS
from .timeline import Stretch, drawing

_WIDTH = 480
_MOST_NAMED = 20  # ranges of a line in its title


def write_html(
    reports: Sequence[Report],
    path: str | os.PathLike[str],
    *,
    stretches: Sequence[Stretch] = (),
) -> None:
    """Write reports as one self-contained page.

    Parameters
    ----------
    reports : sequence of Report
        Reports of any tools.
    path : path
        File to write; an existing file is overwritten.
    stretches : sequence of Stretch
        Timeline to draw below the reports.

    Raises
    ------
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from cpattn_proof import Finding, Report
    >>> from cpattn_proof.page import write_html
    >>> report = Report("lint", "plan.json", (Finding("OWN", "token 5 is on 2 ranks"),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = pathlib.Path(folder, "report.html")
    ...     write_html([report], page)
    ...     "token 5 is on 2 ranks" in page.read_text()
    True
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cpattn_proof.page", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        reports=reports,
        invariants=INVARIANTS,
        bars_of=bars_of,
        as_json=lambda details: json.dumps(details, indent=2, default=str),
        timeline=drawing(stretches),
        num_findings=sum(len(report.findings) for report in reports),
        all_proved=all(report.proved for report in reports),
    )
    # Names of files and in plans may have lone surrogates, which UTF-8 cannot encode.
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")


def bars_of(finding: Finding) -> dict[str, Any] | None:
    """Return the bars of a picture in pixels; None if it is text only."""
    bars: Mapping[str, Any] | None = getattr(finding.picture, "bars", None)
    if bars is None or bars["end"] <= bars["begin"]:
        return None
    begin, scale = bars["begin"], _WIDTH / (bars["end"] - bars["begin"])

    def pixels(number: int) -> float:
        return round((number - begin) * scale, 2)

    lines = [
        {
            "name": line["name"],
            "title": _title(line["ranges"]),
            "shapes": _apart(
                [(pixels(b), max(pixels(e) - pixels(b), 1)) for b, e in line["ranges"]]
            ),
        }
        for line in bars["lines"]
    ]
    mark = bars["mark"]
    return {
        "lines": lines,
        "mark": None if mark is None else pixels(mark),
        "number": mark,
        "note": bars["note"],
    }


def _title(ranges: Sequence[tuple[int, int]]) -> str:
    """Return the bounds of the first ranges as text."""
    texts = [f"{begin} to {end - 1}" for begin, end in ranges[:_MOST_NAMED]]
    rest = len(ranges) - len(texts)
    return ", ".join([*texts, *([f"and {rest} more"] if rest else [])]) or "none"


def _apart(shapes: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return shapes in order, joined where they touch, as there may be one for each token."""
    apart: list[tuple[float, float]] = []
    for x, width in shapes:
        begin, before = apart[-1] if apart else (x, -1.0)
        if x <= begin + before:
            apart[-1] = (begin, round(max(before, x + width - begin), 2))
        else:
            apart.append((x, width))
    return apart
