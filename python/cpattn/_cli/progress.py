# SPDX-License-Identifier: Apache-2.0
"""Where a long command stands, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

SECONDS_BETWEEN_LINES = 10.0


class ProgressLines:
    """A line about every ten seconds, for logs; a context manager.

    The lines come from a thread of their own: what takes long need not say that it does.
    """

    def __init__(self, command: str, unit: str = "") -> None:
        self._command, self._unit = command, unit
        self._text = "starting"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="cpattn progress", daemon=True)

    def __enter__(self) -> ProgressLines:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Write no more lines."""
        self._end.set()

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """Note what is being done, and how much of it all is."""
        share = f", {done:,} of {total:,} {self._unit}" if total else ""
        self._text = f"{what}{share}"

    def _tick(self) -> None:
        while not self._end.wait(SECONDS_BETWEEN_LINES):
            seconds = time.monotonic() - self._begin
            with suppress(OSError, ValueError, AttributeError):  # nobody can read it
                print(
                    f"{self._command}: {seconds:.0f} s: {self._text}", file=sys.stderr, flush=True
                )


class ProgressBar:
    """A bar that moves, on a terminal; a context manager, and gone when it ends."""

    def __init__(self, console: Any, unit: str = "") -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
        columns: list[Any] = [spinner, TextColumn("{task.description}", markup=False)]
        if unit:
            columns += [BarColumn(bar_width=None), MofNCompleteColumn()]
            if console.width >= 80:
                columns.append(TextColumn(unit))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """Show what is being done, and how much of it all is."""
        self._bar.update(self._task, completed=done, total=total, description=what)


def make_progress(command: str, unit: str = "") -> ProgressBar | ProgressLines:
    """A bar if stderr is a terminal that can show one, else lines; `unit` is what is counted."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return ProgressBar(console, unit)
    return ProgressLines(command, unit)
