# SPDX-License-Identifier: Apache-2.0
"""`cpattn replay --capture` and `cpattn plan --capture`, as a user meets them."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner

import cpattn
from cpattn._cli.program import commands
from cpattn.proof import capture, read_captures


def run(*arguments, status=0):
    """What a command prints."""
    result = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def path(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        for length in (4000, 9000):
            cpattn.build_cp_metadata([length], [length + 512], cp_rank=0, cp_size=2)
    return path


def test_recorded_plans_are_made_again(path, tmp_path):
    *_, verdict, _ = lines = run(
        "replay", "--capture", path, "--json", tmp_path / "report.json"
    ).splitlines()
    assert re.match(r"rank 0: 2 calls in \d+\.\d{3} s, cpattn ", lines[0])
    (row,) = (line.split() for line in lines if line.startswith("build_cp_metadata"))
    assert row[1] == "2"
    assert re.fullmatch(r"2 plans: proved \(\d+\.\d s\)", verdict)
    assert json.loads((tmp_path / "report.json").read_text())["proved"]


def test_plans_of_another_version_are_refuted(path):
    text = path.read_text().replace('"strategy":"zigzag"', '"strategy":"contiguous"')
    path.write_text(text)
    output = run("replay", "--capture", path, status=1)
    assert "OWN: 2 of 2 plans differ from those recorded" in output
    assert "rank 0: build_cp_metadata, " in output


def test_a_process_that_was_killed_is_named(path):
    path.write_bytes(path.read_bytes()[:-9])
    of_killed = read_captures([path])
    assert len(of_killed.batches) == 1
    assert of_killed.truncated == (path,)
    output = run("replay", "--capture", path)
    assert f"{path}: its last line is not whole, its process was ended" in output


def test_recorded_batches_are_predicted_over_other_ranks(path):
    output = run("plan", "--capture", path, "--cp-size", "16", "--strategy", "zigzag")
    assert output.startswith("2 batches, 13,000 new tokens; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "--cp-size", "4"), "--capture makes recorded plans again: beside it goes"),
        (("plan", "--tokens", "9"), "a batch comes from one of "),
        (("lint",), "from_capture: there is no call of ContextParallel.plan"),
    ],
)
def test_what_does_not_go_with_a_capture_is_refused(path, arguments, message):
    assert message in run(*arguments, "--capture", path, status=2)


def test_a_capture_of_nothing_has_nothing_to_share_out_or_make_again(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        pass
    output = run("plan", "--capture", path, status=2)
    assert "there is no batch with new tokens in it" in output
    assert "not checked: OWN, there is no plan in the capture" in run("replay", "--capture", path)


@pytest.mark.parametrize("command", ["plan", "replay", "lint", "simulate"])
def test_what_is_no_capture_or_not_there_cannot_be_judged(command, tmp_path):
    assert "missing" in run(command, "--capture", tmp_path / "missing", status=2)
    (tmp_path / "notes").write_text("hello\n")
    output = run(command, "--capture", tmp_path / "notes", status=2)
    assert "notes, line 1: no record of a capture" in output


def test_something_has_to_be_judged():
    assert "a PLAN or --capture must be given" in run("lint", status=2)
