# SPDX-License-Identifier: Apache-2.0
"""Runs, for each mutant, the tests that reach it until one fails."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from mutate.build import Build
from mutate.control import Control
from mutate.operators import Mutant
from mutate.reach import Reach, digests, file_of, measured
from mutate.suites import CppSuite, PythonSuite, Verdict

Key = tuple[str, str, str, str, str, int]
_CHUNK = 2.0  # seconds of tests that one process runs; what fails is likely in the first


@dataclass(frozen=True)
class Entry:
    path: str
    function: str
    line: str
    original: str
    mutated: str
    nth: int
    outcome: str
    """killed, survived or hung, which counts as killed"""
    by: str
    """The test that failed or hung."""
    seconds: float
    tests: str
    """A digest of what the outcome depends on: see `_digest`."""

    @property
    def key(self) -> Key:
        return self.path, self.function, self.line, self.original, self.mutated, self.nth


class Journal:
    """The last entry of a mutant counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[Key, Entry] = {}
        self._lock = threading.Lock()
        if path.exists():
            for line in path.read_text().splitlines():
                entry = Entry(**json.loads(line))
                self.entries[entry.key] = entry

    def add(self, entry: Entry) -> None:
        with self._lock, self.path.open("a") as file:
            print(json.dumps(asdict(entry)), file=file)
            self.entries[entry.key] = entry


class Worker:
    """A process of each suite, and the memory by which they are told of mutants."""

    def __init__(self, build: Build, tests: list[str], index: int) -> None:
        self.control = Control(build.folder / f"control{index}")
        self.suites: list[CppSuite | PythonSuite] = []
        if build.program.exists():
            self.suites.append(CppSuite(build, self.control))
        if tests:
            log = build.folder / f"pytest{index}.log"
            self.suites.append(PythonSuite(build, self.control, tests, log))

    def close(self) -> None:
        for suite in self.suites:
            suite.close()


class Campaign:
    """All tests must pass while no mutant is active: that is measured first."""

    def __init__(self, build: Build, tests: list[str], jobs: int) -> None:
        self._build = build
        # Before they are read: who changes a test meanwhile has it run again.
        self._digests = digests(build, tests)
        self._workers = [Worker(build, tests, i) for i in range(jobs)]
        first = self._workers[0]
        self._reach: Reach = measured(
            self._digests, first.control, first.suites, build.folder / "reach.json"
        )
        self._kills: dict[str, Counter[str]] = {}

    def __enter__(self) -> Campaign:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.close()

    def run(self, numbers: list[int], journal: Journal) -> None:
        for entry in journal.entries.values():
            if entry.outcome == "killed":
                self._kills.setdefault(entry.path, Counter())[entry.by] += 1
        waiting = iter([number for number in numbers if not self._known(number, journal)])
        lock = threading.Lock()
        failures: list[BaseException] = []

        def work(worker: Worker) -> None:
            try:
                while not failures:
                    with lock:
                        number = next(waiting, None)
                    if number is None:
                        return
                    entry = self._tried(worker, number)
                    journal.add(entry)
                    print(f"{entry.outcome:8}  {entry.path}  {entry.line}  |  {entry.original}  ->"
                          f"  {entry.mutated}  |  {entry.by}", flush=True)  # fmt: skip
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _digest(self, number: int, by: str) -> str:
        """Of the sources, and of the file of the test that fails or of all that reach a mutant."""
        files = sorted({file_of(test) for test in ([by] if by else self._reach.tests[number])})
        text = " ".join(self._digests.get(name, "gone") for name in files)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _known(self, number: int, journal: Journal) -> bool:
        """Whether the sources and the tests are those of the entry."""
        entry = journal.entries.get(self._build.mutants[number].key)
        return entry is not None and entry.tests == self._digest(number, entry.by)

    def _tried(self, worker: Worker, number: int) -> Entry:
        mutant = self._build.mutants[number]
        begin = time.monotonic()
        outcome, by = "survived", ""
        for suite, tests in self._chunks(worker, mutant, number):
            worker.control.activate(number)
            limit = 15.0 + 8.0 * sum(self._reach.seconds[test] for test in tests)
            verdict: Verdict = suite.run(tests, limit)
            if verdict.outcome != "passed":
                outcome = "hung" if verdict.outcome == "hung" else "killed"
                by = verdict.by
                self._kills.setdefault(mutant.path, Counter())[by] += 1
                break
        seconds = round(time.monotonic() - begin, 2)
        return Entry(*mutant.key, outcome, by, seconds, self._digest(number, by))

    def _chunks(
        self, worker: Worker, mutant: Mutant, number: int
    ) -> Iterator[tuple[CppSuite | PythonSuite, list[str]]]:
        """First C++, and first what has killed mutants of that file, and what is quick."""
        kills = self._kills.get(mutant.path, Counter())
        seconds = self._reach.seconds
        for suite in worker.suites:
            own = set(suite.tests)
            tests = [test for test in self._reach.tests[number] if test in own]
            tests.sort(key=lambda test: (seconds[test] / (1 + kills[test]) ** 2, test))
            chunk: list[str] = []
            for test in tests:
                if chunk and sum(seconds[t] for t in chunk) + seconds[test] > _CHUNK:
                    yield suite, chunk
                    chunk = []
                chunk.append(test)
            if chunk:
                yield suite, chunk
