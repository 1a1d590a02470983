# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: --closing-table prints the runs in the folder of --records, also from files of
GoogleTest, and the steps of .ci/run; parts that did not run and unallowed skips of C++ are
errors."""

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from audit import fail_run, machine, skips, steps
from audit.records import Record, read

# Instruction set in names of C++ tests, with an underscore for a hyphen.
_ISA = re.compile(
    r"(?<![a-z0-9])(portable|avx2|avx512bf16|avx512|amx_twin|amx|neonbf16|neon)(?![a-z0-9])"
)


@dataclass(frozen=True)
class Part:
    kind: str
    name: str
    needs: tuple[str, ...]

    def is_in(self, records: list[Record]) -> bool:
        return any(r.kind == self.kind and self.name in ("", r.name) for r in records)


def parts(text: str | None = None) -> list[Part]:
    entries = skips.tomllib.loads(skips.LIST.read_text() if text is None else text)
    return [
        Part(part["kind"], part.get("name", ""), tuple(part.get("needs", ())))
        for part in entries.get("part", [])
    ]


def from_googletest(path: Path) -> tuple[list[Record], list[tuple[str, str]]]:
    """Return records of the C++ tests in a file, and the skipped tests with their reasons.

    The file is named after the run, or after the run and its share of the tests: asan.3.xml.
    """
    passed: Counter[tuple[str, str]] = Counter()
    skipped = []
    run = path.name.partition(".")[0]
    for test in ElementTree.parse(path).iter("testcase"):
        name = f"{test.get('classname')}.{test.get('name')}"
        if (skip := test.find("skipped")) is not None:
            skipped.append((f"cpp/{run}::{name}", "".join(skip.itertext())))
        elif test.find("failure") is None:
            passed["C++ tests", run] += 1
            passed.update(
                {("instruction set", isa.replace("_", "-")) for isa in _ISA.findall(name)}
            )
    return [Record(*what, "", f"C++, {run}", n) for what, n in sorted(passed.items())], skipped


def lines(records: list[Record]) -> list[str]:
    """Return aligned columns: kind, name and version, passed tests by run."""
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for r in records:
        rows[r.kind, f"{r.name} {r.version}".strip()][r.run] += r.passed
    width = [max(len(row[i]) for row in rows) for i in (0, 1)] if rows else [0, 0]
    return [
        f"{kind:{width[0]}}  {name:{width[1]}}  "
        + ", ".join(f"{passed} in {run}" for run, passed in sorted(runs.items()) if run)
        for (kind, name), runs in sorted(rows.items())
    ]


def complaints(records: list[Record], skipped: list[tuple[str, str]]) -> list[str]:
    entries = skips.read()
    said = [(test, skips.complaint_about(test, reason, entries)) for test, reason in skipped]
    return [f"{test} was skipped: {complaint}" for test, complaint in said if complaint] + [
        f"{part.kind} {part.name}: no record of it, and this machine has all that it needs"
        for part in parts()
        if not part.is_in(records) and all(map(machine.has, part.needs))
    ]


class Table:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[str] = []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        records, skipped = read(self._folder), []
        for path in sorted(self._folder.glob("*.xml")):
            more_records, more_skipped = from_googletest(path)
            records += more_records
            skipped += more_skipped
        self._lines = lines(records)
        if missing := complaints(records, skipped):
            fail_run(session, "what should have run", "\n".join(missing))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("what ran: tests passed, by run")
        for line in self._lines:
            terminalreporter.line(line)
        if taken := steps.read(self._folder):
            terminalreporter.section(f"seconds of steps: {taken.key}")
            for line in taken.lines(steps.stored(taken.key)):
                terminalreporter.line(line, yellow=line.endswith("what is stored"))


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--closing-table",
        action="store_true",
        help="print what all runs wrote into the folder of --records; fail if a part is missing",
    )


def configure(config: pytest.Config) -> None:
    if config.getoption("closing_table") and not hasattr(config, "workerinput"):
        folder = config.getoption("records")
        if folder is None:
            raise pytest.UsageError("--closing-table needs --records")
        config.pluginmanager.register(Table(folder), "cpattn-table")


def main(folder: str) -> int:
    """Print the engines and environments in which tests passed, for ``make test-engines``."""
    engines = [record for record in read(Path(folder)) if record.kind == "engine"]
    print("\n".join(["What ran, and how many tests passed:", *lines(engines)]))
    return 0 if engines else f"audit.table: no test in {folder} ran in an engine"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
