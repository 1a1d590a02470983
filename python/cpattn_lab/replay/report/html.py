# SPDX-License-Identifier: Apache-2.0
"""HTML report: one self-contained page of figures, plots as SVG, and the table."""

from __future__ import annotations

from pathlib import Path

import jinja2

from ..records import ReplayReport
from .plots import COLORS, plots
from .summary import figures, summarize, table_header, table_legend, table_row


def write_html(report: ReplayReport, title: str, path: Path) -> None:
    """Write the page; it loads nothing from elsewhere."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cpattn_lab.replay.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    header = table_header(report)
    page = environment.get_template("report.html.j2").render(
        title=title,
        report=report,
        summary=summarize(report),
        figures=figures(report),
        plots=plots(report),
        colors=COLORS,
        phases=report.options.phases,
        header=header,
        legend=table_legend(report, header),
        rows=[table_row(batch, report) for batch in report.batches],
    )
    path.write_text(page, encoding="utf-8")
