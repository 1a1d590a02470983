# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: with --records=FOLDER a run appends JSON lines to a file there, with the number
of passed tests by `note` or by the marker `engine("name of the distribution")`."""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from audit import machine

_PROPERTY = "cpattn-ran"
_notes: list[tuple[str, str, str]] = []


@dataclass(frozen=True)
class Record:
    """Count of a run's tests that passed with one thing of a kind."""

    kind: str
    name: str
    version: str
    run: str
    passed: int


def note(kind: str, name: str, version: str = "") -> None:
    """Note that the running test, or the test of the running fixture, uses this."""
    _notes.append((kind, name, version))


def append(folder: Path, records: list[Record]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"pytest-{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read(folder: Path) -> list[Record]:
    return [
        Record(**json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


class Notes:
    """Plug-in beside the tests, also in workers of xdist: reports carry the notes of their test."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report: Any = yield
        if call.when == "setup" and report.passed:
            for marker in item.iter_markers("engine"):
                note("engine", marker.args[0], version(marker.args[0]))
        if call.when != "teardown" and _notes:
            item.user_properties.append((_PROPERTY, [list(entry) for entry in _notes]))
            report.user_properties = list(item.user_properties)
        _notes.clear()
        return report


class Recorder:
    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._passed: Counter[tuple[str, str, str]] = Counter()
        self._total = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._total += 1
            properties = [value for name, value in report.user_properties if name == _PROPERTY]
            self._passed.update({tuple(entry) for notes in properties for entry in notes})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        python = platform.python_version()
        self._passed["interpreter", python.rpartition(".")[0], python] = self._total
        if machine.sanitizer():
            self._passed["sanitizer", f"{machine.sanitizer()}, the extension", ""] = self._total
        append(
            self._folder,
            [
                Record(*what, run=self._run, passed=passed)
                for what, passed in sorted(self._passed.items())
                if passed
            ],
        )


def name_of_this_run() -> str:
    run = f"Python {platform.python_version()} in {Path(sys.prefix).name}"
    return f"{run}, {machine.sanitizer()}" if machine.sanitizer() else run


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, metavar="FOLDER", help="write down there what ran")


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine(distribution): runs code of that engine")
    config.pluginmanager.register(Notes(), "cpattn-notes")
    folder = config.getoption("records")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(folder, name_of_this_run()), "cpattn-recorder")
