# SPDX-License-Identifier: Apache-2.0
"""`cpattn simulate` as people use it, and the page about it."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("click")

from click.testing import CliRunner

from cpattn._cli.program import commands
from support.pages import run_page
from support.places import ROOT
from support.time_limits import PATIENCE

START = "import torch, sys, torch.distributed as dist\ndist.init_process_group()\n"
BARRIER = f"{START}print('here', *sys.argv[1:])\ndist.barrier()\n"
HANG = f"{START}if dist.get_rank(): dist.barrier()\n"
CATCHES = f"""{START}while True:
    try: torch.ones(3) + 1
    except BaseException: pass
"""


@pytest.fixture
def simulate(tmp_path, children):
    """Runs the command on a script, in a process of its own."""

    def run(script, *options, arguments=()):
        (tmp_path / "script.py").write_text(script)
        words = [sys.executable, "-m", "cpattn", "simulate", "--ranks", "2", *options]
        return children.run([*words, "script.py", *arguments], cwd=tmp_path, timeout=PATIENCE)

    return run


def test_what_holds_is_said_to(simulate):
    run = simulate(BARRIER, arguments=["--layers", "2"])
    assert run.returncode == 0, run.stderr
    assert "[rank 0] here --layers 2\n" in run.stdout
    assert run.stdout.count("here") == 2  # although it runs in three orders
    assert "script.py on 2 ranks: proved" in run.stdout
    assert "barrier                        1 calls" in run.stdout


def test_json_is_alone_on_standard_output(simulate, tmp_path):
    run = simulate(HANG, "--json", "--seed", "3", "--trace", "trace.json")
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert report["findings"][0]["kind"] == "rank-returned"
    assert report["facts"]["seeds"] == [3]
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def test_a_program_that_does_not_end_is_ended(simulate):
    run = simulate(CATCHES, "--time-limit", "1")
    assert run.returncode == 2
    assert "not over after 1 s (--time-limit)" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"{START}dist.barrier()\nraise KeyError('layer')", "KeyError: 'layer' (script.py:4)"),
        (f"{START}dist.barrier()\nraise OSError('a\\nb')", "raised OSError: a b (script.py:4)"),
        (f"{START}import os\nos.fork()\n", "forks; all ranks are simulated in one process"),
        ("print(1)\n", "no rank communicates"),
        ("print(", "never closed"),
    ],
)
def test_what_cannot_be_judged_ends_in_a_line(script, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(script)
    run = CliRunner().invoke(commands, ["simulate", "--ranks", "2", "script.py"])
    assert run.exit_code == 2
    *_, line = run.stderr.splitlines()
    assert line.startswith("Error: simulate: ")
    assert message in line
    assert ("Traceback" in run.stderr) == ("raise" in script)


@pytest.mark.slow
def test_the_page_is_run_from_top_to_bottom(tmp_path, children):
    run_page(ROOT / "docs" / "proof" / "simulate.md", tmp_path, children)
