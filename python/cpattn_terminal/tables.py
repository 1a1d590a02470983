# SPDX-License-Identifier: Apache-2.0
"""Tables on standard output, as wide as it is; columns that do not fit are left out and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import streams

_MIN_WIDTH = 20
_FILE_WIDTH = 100  # of text in a file, which has no width of its own
_ASCII_HEAD = box.Box(str(box.SIMPLE_HEAD).replace("─", "-"), ascii=True)


class _Console(Console):
    """Console that leaves a closed pipe to the caller; rich would exit with its own code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Row(NamedTuple):
    """Cells of a table, with a style, and a line below if another section follows."""

    cells: Sequence[str]
    ends_section: bool = False
    style: str = ""


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Row],
    *,
    less_important: Sequence[str],
    left: Sequence[str] = (),
    console: Console | None = None,
) -> tuple[Console, list[str]]:
    """Print a table with its title.

    Parameters
    ----------
    less_important : names of columns
        Columns to leave out if they do not fit, in this order.
    left : names of columns
        Columns that are justified left, not right.
    console : Console, optional
        Default: standard output, `COLUMNS` wide if that is set. A file is as wide as the table.

    Returns
    -------
    console, header
        Console of the table, for the text below, and the printed columns.
    """
    widths = {
        name: max(len(name), *(len(row.cells[i]) for row in rows)) for i, name in enumerate(header)
    }
    kept = list(header)
    console = _console(console, _width(widths, kept, 2))
    for name in less_important:
        if _width(widths, kept, 1) > console.width and name in kept:
            kept.remove(name)
    roomy = _width(widths, kept, 2) <= console.width
    table = Table(
        box=_ASCII_HEAD if console.options.ascii_only else box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0) if roomy else 0,
    )
    for name in kept:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        cells = [cell for name, cell in zip(header, row.cells, strict=True) if name in kept]
        table.add_row(*cells, end_section=row.ends_section, style=row.style)
    console.print(Text(f"{title}\n", style="bold"))
    console.print(table)
    missing = [name for name in header if name not in kept]
    if missing:
        console.print(
            f"[{console.width} columns have no room for {', '.join(missing)}]", markup=False
        )
    return console, kept


def _width(widths: dict[str, int], kept: Sequence[str], gap: int) -> int:
    return sum(widths[name] for name in kept) + gap * (len(kept) - 1)


def _console(console: Console | None, table_width: int) -> Console:
    if console is not None and console.is_terminal:
        return console
    width = streams.width() or max(table_width, _FILE_WIDTH)
    return _Console(file=console.file if console else None, width=max(width, _MIN_WIDTH))
