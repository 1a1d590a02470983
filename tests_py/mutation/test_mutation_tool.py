# SPDX-License-Identifier: Apache-2.0
"""The tool that changes sources and runs the tests, on sources with known mutants."""

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
from cpattn_tool import ANSWER


def test_clipped():
    assert clipped(4, ANSWER) == 2
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
    def __init__(self, root: Path) -> None:
        self.root, self.journal = root, root / "build" / "mutation" / "journal.jsonl"
        self.test = self.write("tests_py/test_clip.py", TEST)
        self.write("python/cpattn/__init__.py", "")
        self.write("python/cpattn/clip.py", CLIPPED)
        self.write("python/cpattn_tool.py", "ANSWER = 2")  # a package without mutants

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, code: int = 1) -> tuple[list[str], subprocess.CompletedProcess[str]]:
        """Return the outcomes that a run adds, and the finished process."""
        before = self.journal.read_text().splitlines() if self.journal.exists() else []
        command = [sys.executable, "-m", "mutate", f"--root={self.root}", "--tests=test_*.py"]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
        done = subprocess.run(
            [*command, "--bar=100", "python/cpattn/clip.py"], cwd=self.root, env=environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        new = self.journal.read_text().splitlines()[len(before) :]
        return sorted(json.loads(line)["outcome"] for line in new), done


def last_row(output: str) -> list[str]:
    return next(line for line in output.splitlines() if line.startswith("all ")).split()[1:]


def test_runs_on_a_project_whose_mutants_are_known(tmp_path: Path) -> None:
    project = Project(tmp_path)
    extension = project.write("build/release/python/cpattn/_core.test.so", "")
    tried, done = project.run()
    assert tried == ["killed", "survived"]
    assert last_row(done.stdout) == ["2", "1", "1", "0", "50.0", "%"]
    assert "value > limit  ->  value >= limit" in done.stdout.splitlines()[-1]
    made = project.root / "build" / "mutation" / "python" / "cpattn" / extension.name
    assert made.resolve() == extension  # mutants of Python use the core of the release build
    assert project.run()[0] == []
    project.write("tests_py/test_more.py", TEST)
    assert project.run()[0] == ["survived"]
    project.test.write_text(TEST.replace("test_clipped", "test_both"))
    assert project.run()[0] == ["killed", "survived"]
    project.write("tests_py/mutation/verdicts.toml", EQUIVALENT.format(">"))
    assert last_row(project.run(code=0)[1].stdout) == ["2", "1", "0", "1", "100.0", "%"]
    project.write("tests_py/mutation/verdicts.toml", EQUIVALENT.format("<"))
    output = project.run()[1].stdout
    assert "not equivalent: python/cpattn/clip.py" in output
    assert " fails" in output
    project.test.write_text(TEST.replace("== 2", "== 3"))
    message = "test_clip.py::test_clipped failed with nothing changed"
    assert message in project.run()[1].stderr


class Sums:
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


def test_a_program_has_all_mutants_of_a_source_that_compile(tmp_path: Path) -> None:
    sums = Sums(tmp_path)
    assert sums.result(0) == 29  # 0 + ... + 8, without 7
    assert sums.result(sums.number("i < n", "i <= n")) == 29 + 9
    assert sums.result(sums.number("i == 7", "i != 7")) == 7
    assert sums.result(sums.number("sum += i", "sum -= i")) == -29
    assert sums.result(sums.number("7", "7 + 1")) == 28
    assert sums.result(sums.number("continue;", "break;")) == 21
    left_out = [sums.found[number] for number in sums.found.keys() - sums.kept.keys()]
    assert [mutant.mutated for mutant in left_out] == ['"the " - name']
    sums.result(0)
    functions = {sums.kept[number].function for number in sums.control.reached()}
    assert functions == {"sum_below"}


def test_every_verdict_is_of_a_mutant_that_there_is() -> None:
    why = Verdicts(ROOT / "tests_py" / "mutation" / "verdicts.toml").why
    assert why
    known = {m.key for path in {key[0] for key in why} for m in mutants(ROOT / path, ROOT)}
    assert not why.keys() - known
    assert all(why.values())
