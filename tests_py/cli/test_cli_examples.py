# SPDX-License-Identifier: Apache-2.0
"""What `cpattn` and its help texts teach: every example in them can be typed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import cpattn

pytest.importorskip("click")
pytest.importorskip("torch")

from click.testing import CliRunner, Result

from cpattn._cli.program import commands
from cpattn.cost_model import Rates
from cpattn.cost_model import command as plan_command
from cpattn.proof import capture
from support.places import ROOT

PAGE = ROOT / "docs" / "command_line.md"
ROWS = {"request": [0], "position": [0], "count": [1]}
PLAN = {"schema": "cpattn-plan/1", "requests": [{"extend": 1}], "ranks": [{"rows": ROWS}]}


class Reached(Exception):
    """A replay or a simulation would have begun."""


def help_of(*arguments: str) -> str:
    result = CliRunner().invoke(commands, [*arguments, "--help"], prog_name="cpattn")
    assert result.exit_code == 0
    return result.output


def examples_in(text: str) -> list[str]:
    """Lines that begin with the command, or a variable before it; continued ones joined."""
    joined = re.sub(r"\\\n\s+", "", text)
    return re.findall(
        r"^ *(?:\$ )?((?:[A-Z_]+=\S+ )?cpattn [a-z]+ *(?!.*COMMAND).*?) *$", joined, re.M
    )


HELP = {name: examples_in(help_of(*name.split())) for name in ("", *commands.commands)}
EXAMPLES = sorted({example for examples in HELP.values() for example in examples})


def typed(example: str) -> Result:
    """An example in its quick form: what takes long ends where it begins, rates are given."""
    words = shlex.split(example)
    variables = dict(w.split("=", 1) for w in words[: words.index("cpattn")])
    with (
        mock.patch("cpattn.replay.driver.replay", side_effect=Reached),
        mock.patch("cpattn.proof.simulate_script", side_effect=Reached),
        mock.patch("cpattn.proof.simulate_capture", side_effect=Reached),
        mock.patch("cpattn.proof.conform", side_effect=Reached),
        mock.patch("cpattn.proof.linting.adapters.captures.from_capture", return_value=[PLAN]),
        mock.patch.object(plan_command, "calibrate", return_value=Rates(gflops=100.0)),
    ):
        arguments = words[words.index("cpattn") + 1 :]
        return CliRunner(env=variables).invoke(commands, arguments, prog_name="cpattn")


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that examples name."""
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
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_can_be_typed(example: str) -> None:
    result = typed(example)
    if isinstance(result.exception, Reached):
        return
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) > 5


def test_there_are_examples_of_every_command() -> None:
    assert {e.split()[1] for e in HELP[""]} == set(commands.commands)
    for name in commands.commands:
        assert any(f"cpattn {name}" in example for example in HELP[name]), name


def test_the_command_alone_teaches() -> None:
    alone = CliRunner().invoke(commands, [], prog_name="cpattn")
    assert alone.exit_code == 0
    assert alone.output == help_of()
    for word in ("$ cpattn explain --lens", "docs/tutorials", "docs/command_line.md", "torchrun"):
        assert word in alone.output
    assert list(commands.commands) == re.findall(r"^  ([a-z]+)  ", alone.output, re.M)


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("example", examples_in(PAGE.read_text(encoding="utf-8")))
def test_every_example_of_the_page_can_be_typed(example: str) -> None:
    result = typed(example)
    assert isinstance(result.exception, Reached) or result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["explain", "plan"])
def test_the_page_shows_what_comes_out(name: str) -> None:
    (block,) = re.findall(rf"```console\n\$ (cpattn {name} .*?)```", PAGE.read_text("utf-8"), re.S)
    example, _, shown = block.partition("\n")
    result = CliRunner(env={"COLUMNS": "80"}).invoke(commands, shlex.split(example)[1:])
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_the_page_has_a_row_and_a_section_of_every_command() -> None:
    page = PAGE.read_text("utf-8")
    assert re.findall(r"^\| \[`cpattn (\w+)`\]\(#cpattn-\1\) \|", page, re.M) == list(
        commands.commands
    )
    assert set(re.findall(r"^## cpattn (\w+)$", page, re.M)) == set(commands.commands)


def tables_of_names(title: str) -> set[str]:
    """Names in the first column of the table below a sentence of the page."""
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


def test_the_page_has_all_environment_variables() -> None:
    read = names_in(r"""["'](CPATTN_[A-Z_]+)["']""", "python/**/*.py")
    read |= names_in(r'getenv\("(CPATTN_[A-Z_]+)"', "cpp/**/*.cc", "cpp/**/*.h")
    assert tables_of_names("What the library and the command read") == read


def test_the_page_has_the_variables_of_tests() -> None:
    told = tables_of_names("What tests and benchmarks of the project read")
    read = names_in(r"""environ[^\n"']*["'](CPATTN_[A-Z_]+)""", "tests_py/**/*.py", "bench/**/*.py")
    read |= names_in(r"""VARIABLE = ["'](CPATTN_[A-Z_]+)""", "tests_py/**/*.py", "bench/**/*.py")
    read |= names_in(r"\$\{?(CPATTN_[A-Z_]+)", ".ci/run", "scripts/*.sh")
    others = tables_of_names("What the library and the command read")
    # By these the processes of a test tell each other; nobody sets them by hand.
    private = {name for name in read if name.startswith(("CPATTN_TEST_", "CPATTN_NONSENSE"))}
    assert told == read - others - private


def test_the_page_has_the_options_of_the_build() -> None:
    options = names_in(r"option\((CPATTN_\w+)", "CMakeLists.txt")
    options |= names_in(r"set\((CPATTN_\w+) .*CACHE", "CMakeLists.txt")
    assert tables_of_names("Options of the build") == options


def test_the_page_has_every_command_and_its_options() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, command in commands.commands.items():
        assert f"## cpattn {name}\n" in text
        section = text.partition(f"## cpattn {name}\n")[2].partition("\n## ")[0]
        known = {option for parameter in command.params for option in parameter.opts}
        known |= {option for parameter in command.params for option in parameter.secondary_opts}
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section)) <= known


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word, by the line that the page says to put into ~/.bashrc."""
    command = folder / "cpattn"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cpattn "$@"\n')
    command.chmod(0o755)
    (line,) = re.findall(r"\| bash \| `~/.bashrc` \| `(.*)` \|", PAGE.read_text(encoding="utf-8"))
    script = f"""
        {line}
        complete -p cpattn
        COMP_WORDS=({shlex.join(["cpattn", *words])})
        COMP_CWORD={len(words)}
        _cpattn_completion cpattn
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    installed, *offers = run.stdout.splitlines()
    assert installed.endswith("-F _cpattn_completion cpattn")
    return offers


def test_bash_completes(tmp_path: Path) -> None:
    assert completed(tmp_path, "") == list(commands.commands)
    assert completed(tmp_path, "re") == ["replay"]
    assert completed(tmp_path, "replay", "--strategy", "") == ["zigzag", "interleave", "contiguous"]
    assert completed(tmp_path, "plan", "--dt") == ["--dtype"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_every_shell_is_on_the_page(shell: str) -> None:
    assert f"_CPATTN_COMPLETE={shell}_source cpattn" in PAGE.read_text(encoding="utf-8")
    variables = {**os.environ, "_CPATTN_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-m", "cpattn"]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert "_CPATTN_COMPLETE" in run.stdout


def test_files_are_completed() -> None:
    """click says `file`, and the shell looks for files itself."""
    for option in ("--trace", "--json", "--html"):
        variables = {"COMP_WORDS": f"cpattn replay {option} ", "COMP_CWORD": "3"}
        environment = {**os.environ, **variables, "_CPATTN_COMPLETE": "bash_complete"}
        command = [sys.executable, "-m", "cpattn"]
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert answer.stdout == "file,\n"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        (["explian"], "explain"),
        (["docter"], "doctor"),
        (["plan", "--cp-sise", "8"], "--cp-size"),
        (["doctor", "--jsn"], "--json"),
        (["explain", "--strategy", "zigzac"], "zigzag"),
    ],
)
def test_what_was_meant_is_suggested(typo: list[str], meant: str) -> None:
    result = CliRunner().invoke(commands, typo, prog_name="cpattn")
    assert result.exit_code == 2
    assert meant in result.stderr
    assert result.stderr.count("\n") == 1
