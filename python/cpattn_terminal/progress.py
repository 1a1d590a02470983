# SPDX-License-Identifier: Apache-2.0
"""Progress of a long command on stderr: a bar on a terminal, else occasional lines."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

SECONDS_TO_FIRST_LINE = 1.0  # shorter work prints nothing
SECONDS_BETWEEN_LINES = 10.0
_SECONDS_OF_PACE = 60.0


class Pace:
    """Speed of some work over its last minute, and its expected end."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # times and amounts of work done

    def note(self, done: float, now: float) -> None:
        """Record the work done until now. Time before the first work does not count."""
        if self._seen and (done <= 0 or done < self._seen[-1][1]):
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _SECONDS_OF_PACE:
            self._seen.popleft()

    def rate(self, now: float) -> float | None:
        """Return the work done per second; None if unknown."""
        if len(self._seen) < 2:
            return None
        begin, first = self._seen[0]
        done = self._seen[-1][1] - first
        return done / (now - begin) if done and now - begin >= 0.5 else None

    def seconds_left(self, total: float | None, now: float) -> float | None:
        """Return the seconds until all of `total` is done; None if unknown."""
        rate = self.rate(now)
        return max(total - self._seen[-1][1], 0.0) / rate if rate and total else None


class State(NamedTuple):
    """Work done, all work, and the name of the current work."""

    done: int
    total: int | None
    what: str


def duration(seconds: float) -> str:
    """Format hours, minutes and seconds.

    >>> duration(8.4), duration(83), duration(4000)
    ('0:08', '1:23', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


class ProgressLines:
    """Line after a second and then about every ten seconds, for logs; a context manager.

    A thread writes the lines, even during long work without reports.
    """

    def __init__(self, command: str, unit: str = "") -> None:
        self._command, self._unit = command, unit
        self._state = State(0, None, "starting")
        self._pace = Pace()
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
        """Record the current work, and its share of all work."""
        self._pace.note(done, time.monotonic())
        self._state = State(done, total, what)

    def _tick(self) -> None:
        wait = SECONDS_TO_FIRST_LINE
        while not self._end.wait(wait):
            wait = SECONDS_BETWEEN_LINES
            with suppress(OSError, ValueError, AttributeError):  # no reader
                print(f"{self._command}: {self._line()}", file=sys.stderr, flush=True)

    def _line(self) -> str:
        now = time.monotonic()
        done, total, what = self._state
        parts = [f"{now - self._begin:.0f} s: {what}"]
        if total:
            parts.append(f"{done:,} of {total:,} {self._unit}".rstrip())
        with suppress(IndexError):  # another thread updates the state
            rate, left = self._pace.rate(now), self._pace.seconds_left(total, now)
            if rate and left is not None:
                parts += [_rate_text(rate), f"about {duration(left)} left"]
        return ", ".join(parts)


class ProgressBar:
    """Moving bar on a terminal; a context manager that removes the bar at its end.

    The bar shows work done, speed and time left if there is room: the current work and the time
    left come first.
    """

    def __init__(self, console: Any, unit: str = "") -> None:
        from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        pace = self._pace = Pace()
        width = console.width

        class Numbers(ProgressColumn):
            """Column with the work done, its speed, and the time left."""

            def render(self, task: Any) -> Any:
                now, elapsed = time.monotonic(), duration(task.elapsed or 0)
                if not task.total:
                    return Text(elapsed)
                parts = [f"{100 * task.completed / task.total:.0f} %"]
                if width >= 80:
                    parts = [f"{task.completed:,.0f} of {task.total:,.0f}"]
                    parts[0] += f" {unit}" * (width >= 100)
                rate, left = pace.rate(now), pace.seconds_left(task.total, now)
                if rate and width >= 80:
                    parts.append(_rate_text(rate))
                parts.append(elapsed if left is None else f"{duration(left)} left")
                return Text("  ".join(parts), no_wrap=True)

        spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
        columns: list[Any] = [spinner, TextColumn("{task.description}", markup=False)]
        if unit and width >= 50:
            columns.append(BarColumn(bar_width=None))
        numbers = Numbers(Column(no_wrap=True))  # the bar has the rest of the line
        self._bar = Progress(
            *columns, numbers, console=console, transient=True, redirect_stdout=False
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar before other output."""
        self._bar.stop()

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """Show the current work, and its share of all work."""
        self._pace.note(done, time.monotonic())
        self._bar.update(self._task, completed=done, total=total, description=what)


def make_progress(command: str, unit: str = "") -> ProgressBar | ProgressLines:
    """Make a bar if stderr is a capable terminal, else lines; `unit` is the counted unit."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # `cpattn_lab.check` works without it
        return ProgressLines(command, unit)
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return ProgressBar(console, unit)
    return ProgressLines(command, unit)
