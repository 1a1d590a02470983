# SPDX-License-Identifier: Apache-2.0
"""The tool that changes sources and runs the tests, on sources whose mutants are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutate.build import HERE, compiled
from mutate.control import VARIABLE, Control
from mutate.operators import mutants
from mutate.report import Verdicts

from support.places import ROOT

pytestmark = pytest.mark.slow


CLIPPED = '''\
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

LIMIT = 3


def clipped(value: int, limit: int = LIMIT) -> int:
    """The lower one."""
    if value > limit:
        return limit
    return value
'''
TEST = """\
from cpattn.clip import clipped


def test_clipped():
    assert clipped(4, 2) == 2
    assert clipped(1) == 1
"""
EQUIVALENT = """\
[[equivalent]]
path = "python/cpattn/clip.py"
function = "clipped"
line = "if value > limit:"
original = "value > limit"
mutated = "value {}= limit"
why = "where both are equal, either is the lower one"
"""
SUMS = """\
#include <string>

constexpr int kOne = 1;

int sum_below(int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) {
    if (i == 7) continue;
    sum += i;  // but 7
  }
  return sum;
}

std::string named(const std::string& name) { return "the " + name; }
"""
MAIN = """\
#include <cstdio>
int sum_below(int n);
int main() { std::printf("%d\\n", sum_below(9)); }
"""


class Project:
    """One source, its test, and a run of the tool on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.test = self.write("tests_py/test_clip.py", TEST)
        self.write("python/cpattn/__init__.py", "")
        self.write("python/cpattn/clip.py", CLIPPED)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def judge(self, text: str) -> None:
        self.write("tests_py/mutation/verdicts.toml", text)

    def run(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mutate", f"--root={self.root}", "--tests=test_*.py"]
        return subprocess.run(
            [*command, "--bar=100", "python/cpattn/clip.py"],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(HERE.parent)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def last_row(output: str) -> list[str]:
    return next(line for line in output.splitlines() if line.startswith("all ")).split()[1:]


def test_a_known_mutant_is_killed_and_a_survivor_named(project: Project) -> None:
    done = project.run()
    assert done.returncode == 1, done.stderr
    assert last_row(done.stdout) == ["2", "1", "1", "0", "50.0", "%"]
    assert "value > limit  ->  value >= limit" in done.stdout.splitlines()[-1]


def test_python_alone_runs_on_the_extension_of_the_release_build(project: Project) -> None:
    extension = project.write("build/release/python/cpattn/_core.test.so", "")
    project.run()
    made = project.root / "build" / "mutation" / "python" / "cpattn" / extension.name
    assert made.resolve() == extension


def test_a_known_equivalent_mutant_does_not_count(project: Project) -> None:
    project.judge(EQUIVALENT.format(">"))
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert last_row(done.stdout) == ["2", "1", "0", "1", "100.0", "%"]


def test_a_verdict_that_a_test_refutes_is_an_error(project: Project) -> None:
    project.judge(EQUIVALENT.format("<"))
    done = project.run()
    assert done.returncode == 1
    assert "not equivalent: python/cpattn/clip.py" in done.stdout
    assert "test_clip.py::test_clipped fails" in done.stdout


def test_a_mutant_is_tried_again_when_its_tests_change(project: Project) -> None:
    journal = project.root / "build" / "mutation" / "journal.jsonl"

    def tried() -> list[str]:
        """The outcomes that a run adds."""
        before = len(journal.read_text().splitlines()) if journal.exists() else 0
        assert project.run().returncode == 1
        new = journal.read_text().splitlines()[before:]
        return sorted(json.loads(line)["outcome"] for line in new)

    assert tried() == ["killed", "survived"]
    assert tried() == []
    project.write("tests_py/test_more.py", TEST)
    assert tried() == ["survived"]
    project.test.write_text(TEST.replace("test_clipped", "test_both"))
    assert tried() == ["killed", "survived"]


def test_tests_that_fail_by_themselves_end_the_run(project: Project) -> None:
    project.test.write_text(TEST.replace("== 2", "== 3"))
    done = project.run()
    assert done.returncode == 1
    assert "test_clip.py::test_clipped failed with nothing changed" in done.stderr


class Sums:
    """The mutants of SUMS that compile, in a program."""

    def __init__(self, root: Path) -> None:
        source = root / "meta" / "sums.cc"
        source.parent.mkdir()
        source.write_text(SUMS)
        (root / "main.cc").write_text(MAIN)
        entry = {"command": f"c++ -std=c++20 -o sums.o -c {source}", "directory": str(root)}
        self.found = dict(enumerate(mutants(source, root), 1))
        output, self.kept = compiled({source: entry}, root / "objects", source, self.found)
        self.control = Control(root / "control")
        self._program = root / "main"
        parts = [root / "main.cc", output, HERE / "mutants.cc", "-o", self._program]
        subprocess.run(["c++", "-std=c++20", f"-I{HERE}", *parts], check=True)

    def number(self, original: str, mutated: str) -> int:
        texts = {n: (mutant.original, mutant.mutated) for n, mutant in self.kept.items()}
        return next(n for n, text in texts.items() if text == (original, mutated))

    def result(self, number: int) -> int:
        self.control.activate(number)
        environment = os.environ | {VARIABLE: str(self.control.path)}
        return int(subprocess.check_output(self._program, env=environment, text=True))


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Sums:
    return Sums(tmp_path_factory.mktemp("sums"))


def test_a_program_has_all_mutants_of_a_source(sums: Sums) -> None:
    assert sums.result(0) == 29  # 0 + ... + 8, without 7
    assert sums.result(sums.number("i < n", "i <= n")) == 29 + 9
    assert sums.result(sums.number("i == 7", "i != 7")) == 7
    assert sums.result(sums.number("sum += i", "sum -= i")) == -29
    assert sums.result(sums.number("7", "7 + 1")) == 28
    assert sums.result(sums.number("continue;", "break;")) == 21


def test_what_does_not_compile_is_left_out(sums: Sums) -> None:
    left_out = [sums.found[number] for number in sums.found.keys() - sums.kept.keys()]
    assert [mutant.mutated for mutant in left_out] == ['"the " - name']


def test_mutants_that_a_program_reaches_are_known(sums: Sums) -> None:
    sums.result(0)
    functions = {sums.kept[number].function for number in sums.control.reached()}
    assert functions == {"sum_below"}


def test_every_verdict_is_of_a_mutant_that_there_is() -> None:
    why = Verdicts(ROOT / "tests_py" / "mutation" / "verdicts.toml").why
    assert why
    known = {m.key for path in {key[0] for key in why} for m in mutants(ROOT / path, ROOT)}
    assert not why.keys() - known
    assert all(why.values())
