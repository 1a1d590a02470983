# SPDX-License-Identifier: Apache-2.0
"""The tests: those of the C++ program, and those that a pytest process holds ready."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mutate.build import Build
from mutate.control import VARIABLE, Control
from mutate.limits import limit_memory

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Verdict:
    outcome: str
    """passed, failed or hung"""
    by: str
    """The test that failed or hung."""


class CppSuite:
    """Tests have names such as cpp::Suite.Test."""

    def __init__(self, build: Build, control: Control) -> None:
        self._program = str(build.program)
        self._environment = os.environ | {VARIABLE: str(control.path)}
        listed = subprocess.run(
            [self._program, "--gtest_list_tests"], capture_output=True, text=True, check=True
        )
        self.tests: list[str] = []
        suite = ""
        for line in listed.stdout.splitlines():
            name = line.split("#")[0].strip()
            if line.startswith(" "):
                self.tests.append(f"cpp::{suite}{name}")
            elif name.endswith("."):
                suite = name

    def run(self, tests: list[str], limit: float) -> Verdict:
        """Until the first that fails."""
        names = [test.removeprefix("cpp::") for test in tests]
        command = [self._program, "--gtest_filter=" + ":".join(names), "--gtest_fail_fast"]
        process = subprocess.Popen(
            [*command, "--gtest_brief=0"],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=limit_memory,
        )
        outcome = "hung"
        try:
            output, _ = process.communicate(timeout=limit)
            outcome = "failed" if process.returncode else "passed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        begun = [line.split("] ")[1] for line in output.splitlines() if "[ RUN " in line]
        return Verdict(outcome, f"cpp::{begun[-1]}" if begun and outcome != "passed" else "")

    def close(self) -> None:
        pass


class PythonSuite:
    """Tests have the names that pytest gives them."""

    def __init__(self, build: Build, control: Control, files: list[str], log: Path) -> None:
        ask, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        environment = os.environ | {
            VARIABLE: str(control.path),
            "CPATTN_MUTATION_ASK": str(ask),
            "CPATTN_MUTATION_ANSWER": str(answer),
            # The packages that have no mutants are those of the sources.
            "PYTHONPATH": os.pathsep.join(
                map(str, (build.python, build.root / "python", HERE.parent))
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        options = ["--hypothesis-profile=mutation", "-pmutate.pytest_server"]
        options += ["-pno:cacheprovider", "-pno:xdist", "-q"]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *files],
                cwd=build.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(ask, answer),
            )
        os.close(ask)
        os.close(answer)
        self._questions = os.fdopen(self._ask, "w")
        self._replies = os.fdopen(self._answers)
        first = self._replies.readline()
        if not first:
            raise RuntimeError(f"pytest collected no tests:\n{log.read_text()}")
        self.tests: list[str] = json.loads(first)

    def run(self, tests: list[str], limit: float) -> Verdict:
        """Until the first that fails."""
        question = {"tests": tests, "limit": limit}
        print(json.dumps(question), file=self._questions, flush=True)
        return Verdict(**json.loads(self._replies.readline()))

    def close(self) -> None:
        self._questions.close()
        self._process.wait()
        self._replies.close()
