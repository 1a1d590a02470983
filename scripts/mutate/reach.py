# SPDX-License-Identifier: Apache-2.0
"""Which test reaches which mutants, and how long it takes: measured once, each test alone."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from mutate.build import Build, digest_of
from mutate.control import Control
from mutate.suites import CppSuite, PythonSuite

LIMIT = 300.0


class RecordingError(RuntimeError):
    """A test fails though nothing has been changed."""


@dataclass
class Reach:
    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Of each mutant."""


def file_of(test: str) -> str:
    return "cpp" if test.startswith("cpp::") else test.partition("::")[0]


def digests(build: Build, files: list[str]) -> dict[str, str]:
    """Of files with tests, and of the sources; what tests share counts for all of them."""
    helpers = (p for p in build.root.glob("tests_py/**/*.py") if "test_" not in p.name)
    shared = digest_of(sorted(helpers))
    found = {}
    for name in [*files, "cpp"]:
        cpp_tests = sorted(build.root.glob("tests_cpp/**/*.[ch]*"))
        paths = cpp_tests if name == "cpp" else [build.root / name]
        found[name] = digest_of(paths) + shared + build.digest()
    return found


def measured(
    stamps: dict[str, str], control: Control, suites: list[CppSuite | PythonSuite], store: Path
) -> Reach:
    """Files with tests that are in the store with the same stamp are not run again."""
    known: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    known = {name: entry for name, entry in known.items() if entry["stamp"] == stamps.get(name)}
    for suite in suites:
        for name, group in groupby(suite.tests, file_of):
            if name not in known:
                known[name] = {
                    "stamp": stamps[name],
                    "tests": {test: _alone(test, suite, control) for test in group},
                }
                store.write_text(json.dumps(known))
                print(f"measured {name}", flush=True)
    reach = Reach()
    for entry in known.values():
        for test, (seconds, numbers) in entry["tests"].items():
            reach.seconds[test] = seconds
            for number in numbers:
                reach.tests[number].append(test)
    return reach


def _alone(test: str, suite: CppSuite | PythonSuite, control: Control) -> tuple[float, list[int]]:
    """The seconds it takes, and the mutants it reaches."""
    control.activate(0)
    begin = time.monotonic()
    verdict = suite.run([test], LIMIT)
    if verdict.outcome != "passed":
        raise RecordingError(f"{test} {verdict.outcome} with nothing changed")
    return round(time.monotonic() - begin, 3), control.reached()
