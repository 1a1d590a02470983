# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: a run reports skips that allowed_skips.toml does not allow; with --strict-skips
they are failures."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from audit import machine

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

LIST = Path(__file__).parents[1] / "allowed_skips.toml"
_FOLDER = Path(__file__).parents[1].name + "/"


@dataclass(frozen=True)
class AllowedSkip:
    tests: str
    reason: str
    needs: tuple[str, ...]
    why: str

    def is_about(self, test: str, reason: str) -> bool:
        test = test.removeprefix(_FOLDER)
        names = (test, test.partition("::")[0])
        matches = any(fnmatch.fnmatchcase(name, self.tests) for name in names)
        return matches and re.search(self.reason, reason) is not None

    def needs_for(self, reason: str) -> list[str]:
        """Return the needs, with matches of the regular expression in place of braces."""
        found = re.search(self.reason, reason)
        return [need.format(**found.groupdict()) for need in self.needs] if found else []


def read(text: str | None = None) -> list[AllowedSkip]:
    entries = tomllib.loads(LIST.read_text() if text is None else text).get("skip", [])
    return [AllowedSkip(**(entry | {"needs": tuple(entry["needs"])})) for entry in entries]


def complaint_about(test: str, reason: str, entries: list[AllowedSkip]) -> str:
    """Return why this skip is not allowed, or "" if it is."""
    about = [entry for entry in entries if entry.is_about(test, reason)]
    if not about:
        return f"{LIST.name} has no entry for it"
    needs = sorted({need for entry in about for need in entry.needs_for(reason)})
    if not all(map(machine.has, needs)):
        return ""
    return f"{LIST.name} allows it only without [{', '.join(needs)}], which is there"


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr: Any = report.longrepr
    return (longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)).removeprefix("Skipped: ")


class Skips:
    def __init__(self, config: pytest.Config) -> None:
        self._entries = read()
        self._is_strict = config.getoption("strict_skips")

    def _complaint(self, report: Any) -> str:
        return complaint_about(report.nodeid, reason_of(report), self._entries)

    def _judged(self, report: Any) -> Any:
        if self._is_strict and report.skipped and not hasattr(report, "wasxfail"):
            complaint = self._complaint(report)
            if complaint:
                report.outcome = "failed"
                report.longrepr = f"skipped: {reason_of(report)}\nThat is not allowed: {complaint}"
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        return self._judged((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        return self._judged((yield))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        wrong = Counter(
            (reason_of(report), complaint)
            for report in skipped
            if (complaint := self._complaint(report))
        )
        if not skipped:
            return
        terminalreporter.section("skips")
        terminalreporter.line(
            f"{len(skipped)} skipped, {wrong.total()} of them without leave of {LIST.name}"
        )
        for (reason, complaint), count in sorted(wrong.items()):
            terminalreporter.line(f"{count} not allowed: {reason}: {complaint}", yellow=True)


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help=f"fail where a test is skipped that {LIST.name} does not allow to be",
    )


def configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(config), "cpattn-skips")
    if config.getoption("strict_skips"):
        config.option.continue_on_collection_errors = True
