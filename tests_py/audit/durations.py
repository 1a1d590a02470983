# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: prints the seconds of each folder of tests in all processes, slow files, and the
seconds of parts of make that scripts/timed.sh recorded."""

import os
import time
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

import pytest


class Durations:
    def __init__(self, file_seconds: float | None) -> None:
        self._file_seconds = file_seconds
        self._begin = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        self._seconds[path] += report.duration
        self._tests[path] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self._seconds) > 1:
            terminalreporter.section("seconds of tests by folder, added up over all processes")
            for line in lines(self._seconds, self._tests):
                terminalreporter.line(line)
            for path, seconds in self._seconds.most_common():
                if self._file_seconds is not None and seconds > self._file_seconds:
                    terminalreporter.line(
                        f"{path} took {seconds:.0f} s; a file has {self._file_seconds:g} s",
                        yellow=True,
                    )
        parts = parts_of_make()
        if parts:
            parts.append(("tests in Python", round(time.monotonic() - self._begin)))
            said = ", ".join(f"{name} {seconds} s" for name, seconds in parts)
            terminalreporter.line(f"Time: {said}")


def lines(seconds: Counter[str], tests: Counter[str]) -> list[str]:
    """Return a line for each folder, the longest first, with seconds and tests of its files."""
    by_folder: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for path in seconds:
        by_folder[folder_of(path)] += seconds[path]
        count[folder_of(path)] += tests[path]
    return [f"{s:8.1f} s  {count[name]:6} tests  {name}" for name, s in by_folder.most_common()]


def parts_of_make() -> list[tuple[str, int]]:
    """Return the records of scripts/timed.sh, and remove them."""
    path = Path(os.environ.get("MAKE_TIMES") or os.devnull)
    if not path.is_file():
        return []
    rows = [line.rpartition("\t") for line in path.read_text().splitlines()]
    path.unlink()
    return [(name, int(seconds)) for name, _, seconds in rows]


def folder_of(path: str) -> str:
    """Return the folder of a file below tests_py, such as proof for proof/lint/test_x.py."""
    parts = PurePath(path).parts
    return parts[1] if len(parts) > 2 else parts[0]


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--file-seconds",
        type=float,
        metavar="N",
        help="name the files of tests that took more than N seconds on this machine",
    )


def configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(
            Durations(config.getoption("file_seconds")), "cpattn-durations"
        )
