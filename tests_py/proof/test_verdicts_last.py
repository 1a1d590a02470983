# SPDX-License-Identifier: Apache-2.0
"""Whatever a program or a document has, a judging command ends by its verdict, or with 2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import cpattn

pytest.importorskip("click")
pytest.importorskip("jsonschema")
pytest.importorskip("torch")
from cpattn.captures import recorder
from cpattn_proof.linting import document
from support.command_line import CommandLine

ENDS_WELL = """
import atexit, os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
atexit.register(os._exit, 0)
operation = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(4), op=operation)
"""


def test_the_script_does_not_choose_the_exit_code(
    command_line: CommandLine, tmp_path: Path
) -> None:
    script = tmp_path / "ends_well.py"
    script.write_text(ENDS_WELL)
    done = command_line.run("simulate", "--ranks", "2", str(script))
    assert (done.returncode, "refuted" in done.stdout) == (1, True), done.stderr


BROKEN = """
import sys
from cpattn_terminal.main import main
from cpattn_proof.linting import linter
def lint(_):
    raise {}
linter.lint = lint
sys.argv = ["cpattn", "lint", {!r}]
main()
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [("RuntimeError('oops')", "RuntimeError: oops"), ("MemoryError", "Error: out of")],
)
def test_a_fault_of_a_command_is_no_verdict(children, tmp_path, error, said):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": document.SCHEMA, "ranks": [{}]}))
    done = children.run([sys.executable, "-c", BROKEN.format(error, str(plan))])
    assert done.returncode == 2
    assert said in done.stderr


@pytest.fixture
def by_environment(monkeypatch):
    """Records this process as plug-ins do, into a file; ends with the test."""
    ends = []
    monkeypatch.setattr(recorder.atexit, "register", lambda end, *none: ends.append((end, none)))
    monkeypatch.setattr(recorder, "_by_environment", {})

    def record(path: Path) -> None:
        monkeypatch.setenv("CPATTN_CAPTURE", str(path))
        recorder._by_environment.clear()
        recorder.capture_by_environment()

    yield record
    for end, none in ends:
        end(*none)


def test_files_of_an_earlier_process_of_this_number_stay(by_environment, tmp_path):
    for _ in range(3):
        by_environment(tmp_path / "run-{pid}")
    cpattn.build_cp_metadata([10], cp_rank=0, cp_size=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"run-{os.getpid()}{end}" for end in ("", ".1", ".2")}


def test_an_engine_goes_on_where_nothing_can_be_recorded(by_environment, tmp_path):
    with pytest.warns(UserWarning, match="CPATTN_CAPTURE: nothing is recorded: .*No such file"):
        by_environment(tmp_path / "missing" / "run")
