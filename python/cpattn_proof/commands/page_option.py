# SPDX-License-Identifier: Apache-2.0
"""`--html` of the commands that prove: their reports as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpattn_terminal.options import OutputPath, writing

if TYPE_CHECKING:
    from ..findings import Report

html_option = click.option(
    "--html", "html_path", type=OutputPath(), help="Write the report as a page to this file."
)


def write_page(reports: Sequence[Report], path: Path | None) -> None:
    """Write the page if one was asked for; an error in one line if it cannot be written."""
    if path is None:
        return
    from ..page import write_html

    with writing(path):
        write_html(reports, path)
