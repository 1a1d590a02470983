# SPDX-License-Identifier: Apache-2.0
"""Examples in `cpattn` and its help texts: every one can be typed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import cpattn
from cpattn.captures import capture
from cpattn.doctor.binding import Share
from cpattn.doctor.finding import Finding
from cpattn_lab.cost_model import Rates
from cpattn_lab.cost_model import command as plan_command
from cpattn_terminal.commands import commands
from support.command_line import Reached, invoke, invoke_to_beginning
from support.places import ROOT

PAGE = ROOT / "docs" / "command_line.md"
ROWS = {"request": [0], "position": [0], "count": [1]}
CALLS = {"request": [0], "row": [0], "rows": [1], "keys": [1]}
RANK = {"rows": ROWS, "segments": CALLS}
PLAN = {"schema": "cpattn-plan/1", "requests": [{"extend": 1}], "ranks": [RANK]}


def help_of(*arguments: str) -> str:
    result = invoke(*arguments, "--help")
    assert result.exit_code == 0
    return result.output


def examples_in(text: str) -> list[str]:
    """Return lines that begin with the command, or a variable before it; join continued lines."""
    joined = re.sub(r"\\\n\s+", "", text)
    return re.findall(
        r"^ *(?:\$ )?((?:[A-Z_]+=\S+ )?cpattn [a-z]+ *(?!.*COMMAND).*?) *$", joined, re.M
    )


HELP = {name: examples_in(help_of(*name.split())) for name in ("", *commands.commands)}
EXAMPLES = sorted({example for examples in HELP.values() for example in examples})


def typed(example: str) -> Any:
    words = shlex.split(example)
    variables = dict(w.split("=", 1) for w in words[: words.index("cpattn")])
    with (
        mock.patch("cpattn_proof.linting.adapters.captures.from_capture", return_value=[PLAN]),
        mock.patch("cpattn_proof.captures.remade.planned_again"),
        mock.patch("cpattn_proof.commands.of_captures.largest_step", return_value=[700]),
        mock.patch("cpattn.doctor.report.findings", return_value=[Finding("a", "b", "c")] * 9),
        mock.patch("cpattn.doctor.binding.shares", return_value=[Share(("0",), (0,), 1)]),
        mock.patch.object(plan_command, "calibrate", return_value=Rates(gflops=100.0)),
    ):
        return invoke_to_beginning(*words[words.index("cpattn") + 1 :], env=variables)


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}
    for name in ("trace.jsonl", "conversation_trace.jsonl"):
        Path(name).write_text(json.dumps(record) + "\n")
    for name in ("script.py", "train.py"):
        Path(name).touch()
    for name in ("plan.json", "first.json", "second.json"):
        Path(name).write_text(json.dumps(PLAN) + "\n")
    for name, rank in (("run.cpcap", 0), ("run.0.cpcap", 0), ("run.1.cpcap", 1)):
        monkeypatch.setenv("RANK", str(rank))
        with capture(name):
            cpattn.build_cp_metadata([700], cp_rank=rank, cp_size=2)


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("example", sorted({*EXAMPLES, *examples_in(PAGE.read_text("utf-8"))}))
def test_every_example_can_be_typed(example):
    result = typed(example)
    if not isinstance(result.exception, Reached):
        assert result.exit_code == 0, result.output
        assert example not in EXAMPLES or len(result.stdout.splitlines()) > 5


def test_there_are_examples_of_every_command():
    assert {e.split()[1] for e in HELP[""]} == set(commands.commands)
    for name in commands.commands:
        assert any(f"cpattn {name}" in example for example in HELP[name]), name


def test_the_command_alone_teaches():
    alone = invoke()
    assert alone.exit_code == 0
    assert alone.output == help_of()
    assert "..." not in alone.output.split("Commands:")[1]
    for word in ("$ cpattn explain --lens", "docs/tutorials", "docs/command_line.md", "torchrun"):
        assert word in alone.output
    assert list(commands.commands) == re.findall(r"^  ([a-z]+)  ", alone.output, re.M)


@pytest.mark.parametrize("name", ["explain", "plan"])
def test_the_page_shows_what_comes_out(name):
    (block,) = re.findall(rf"```console\n\$ (cpattn {name} .*?)```", PAGE.read_text("utf-8"), re.S)
    example, _, shown = block.partition("\n")
    result = invoke(*shlex.split(example)[1:], env={"COLUMNS": "80"})
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def tables_of_names(title: str) -> set[str]:
    """Return names in the first column of the table below a sentence of the page."""
    _, _, rest = PAGE.read_text("utf-8").partition(title)
    return set(
        re.findall(r"^\| `(CPATTN_\w+)` \|", rest.partition("\n\n## ")[0].split(":\n\n")[1], re.M)
    )


def names_in(pattern: str, *globs: str) -> set[str]:
    return {
        name
        for glob in globs
        for path in ROOT.glob(glob)
        if path.is_file()
        for name in re.findall(pattern, path.read_text(encoding="utf-8"))
    }


SOURCES = ("tests_py/**/*.py", "bench/**/*.py")


def test_the_page_has_all_variables_and_options():
    read = names_in(r"""["'](CPATTN_[A-Z_]+)["']""", "python/**/*.py")
    read |= names_in(r'getenv\("(CPATTN_[A-Z_]+)"', "cpp/**/*.cc", "cpp/**/*.h")
    assert tables_of_names("The library and the command read these") == read
    of_tests = names_in(r"""environ[^\n"']*["'](CPATTN_[A-Z_]+)""", *SOURCES)
    of_tests |= names_in(r"""VARIABLE = ["'](CPATTN_[A-Z_]+)""", *SOURCES)
    of_tests |= names_in(r"\$\{?(CPATTN_[A-Z_]+)", ".ci/run", "scripts/*.sh")
    # Processes of a test pass these to each other; users do not set them.
    private = {name for name in of_tests if name.startswith(("CPATTN_TEST_", "CPATTN_NONSENSE"))}
    told = tables_of_names("Tests and benchmarks of the project read these")
    assert told == of_tests - read - private
    options = names_in(r"option\((CPATTN_\w+)", "CMakeLists.txt")
    options |= names_in(r"set\((CPATTN_\w+) .*CACHE", "CMakeLists.txt")
    assert tables_of_names("Options of the build") == options


def test_the_page_has_every_command_and_its_options():
    page = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| \[`cpattn (\w+)`\]\(#cpattn-\1\) \|", page, re.M)
    assert rows == list(commands.commands)
    sections = dict(re.findall(r"^## cpattn (\w+)\n(.*?)(?=\n## |\Z)", page, re.M | re.S))
    assert set(sections) == set(commands.commands)
    for name, command in commands.commands.items():
        known = {option for x in command.params for option in (*x.opts, *x.secondary_opts)}
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", sections[name])) <= known


def completed(folder: Path, *lines: str) -> list[list[str]]:
    """Return bash's completions of lines, by the code that the page puts into ~/.bashrc."""
    command = folder / "cpattn"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cpattn "$@"\n')
    command.chmod(0o755)
    (line,) = re.findall(r"\| bash \| `~/.bashrc` \| `(.*)` \|", PAGE.read_text(encoding="utf-8"))
    script = f"{line}\ncomplete -p cpattn\n"
    for words in lines:
        script += (
            f"COMP_WORDS=(cpattn {words}); COMPREPLY=(); COMP_CWORD={len(shlex.split(words))}\n"
            "_cpattn_completion cpattn; echo ${COMPREPLY[@]}\n"
        )
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    run = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    installed, *offers = run.stdout.splitlines()
    assert installed.endswith("-F _cpattn_completion cpattn")
    return [offer.split() for offer in offers]


def test_bash_completes(tmp_path):
    assert completed(tmp_path, "''", "replay --strategy ''") == [
        list(commands.commands),
        ["zigzag", "interleave", "contiguous"],
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_every_shell_is_on_the_page(shell):
    assert f"_CPATTN_COMPLETE={shell}_source cpattn" in PAGE.read_text(encoding="utf-8")
    result = invoke(env={"_CPATTN_COMPLETE": f"{shell}_source"})
    assert result.exit_code == 0
    assert "_CPATTN_COMPLETE" in result.stdout


@pytest.mark.parametrize("option", ["--trace", "--json", "--html"])
def test_files_are_completed(option):
    """click says `file`, and the shell looks for files itself."""
    variables = {"COMP_WORDS": f"cpattn replay {option} ", "COMP_CWORD": "3"}
    answer = invoke(env=variables | {"_CPATTN_COMPLETE": "bash_complete"})
    assert answer.stdout == "file,\n"
