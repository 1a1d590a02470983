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
from cpattn.proof import capture


def run(*arguments):
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


@pytest.fixture
def path(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        for length in (4000, 9000):
            cpattn.build_cp_metadata([length], [length + 512], cp_rank=0, cp_size=2)
    return path


def test_recorded_plans_are_made_again(path, tmp_path):
    result = run("replay", "--capture", path, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert re.match(r"rank 0: 2 calls in \d+\.\d{3} s, cpattn ", lines[0])
    (row,) = (line.split() for line in lines if line.startswith("build_cp_metadata"))
    assert row[1] == "2"
    assert re.fullmatch(r"2 plans: proved \(\d+\.\d s\)", lines[-2])
    assert json.loads((tmp_path / "report.json").read_text())["proved"]


def test_plans_of_another_version_are_refuted(path):
    text = path.read_text().replace('"strategy":"zigzag"', '"strategy":"contiguous"')
    path.write_text(text)
    result = run("replay", "--capture", path)
    assert result.exit_code == 1
    assert "OWN: 2 of 2 plans differ from those recorded" in result.output


def test_a_process_that_was_killed_is_named(path):
    path.write_bytes(path.read_bytes()[:-9])
    result = run("replay", "--capture", path)
    assert result.exit_code == 0
    assert f"{path}: its last line is not whole, its process was ended" in result.output


def test_recorded_batches_are_predicted_over_other_ranks(path):
    result = run("plan", "--capture", path, "--cp-size", "16", "--strategy", "zigzag")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 batches, 13,000 new tokens; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "--cp-size", "4"), "--capture makes recorded plans again: beside it goes"),
        (("plan", "--tokens", "9"), "a batch comes from one of "),
    ],
)
def test_options_of_other_batches_are_refused(path, arguments, message):
    result = run(*arguments, "--capture", path)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("command", ["plan", "replay"])
def test_what_is_no_capture_cannot_be_judged(command, tmp_path):
    (tmp_path / "notes").write_text("hello\n")
    result = run(command, "--capture", tmp_path / "notes")
    assert result.exit_code == 2
    assert "notes, line 1: no record of a capture" in result.output


def test_a_capture_of_decode_steps_has_nothing_to_share_out(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        pass
    result = run("plan", "--capture", path)
    assert result.exit_code == 2
    assert "there is no batch with new tokens in it" in result.output


def test_a_capture_without_plans_has_none_to_make_again(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        pass
    result = run("replay", "--capture", path)
    assert result.exit_code == 0, result.output
    assert "not checked: OWN, there is no plan in the capture" in result.output


@pytest.mark.parametrize("command", ["plan", "replay", "lint", "simulate"])
def test_a_capture_that_is_not_there_is_named(command, tmp_path):
    result = run(command, "--capture", tmp_path / "missing")
    assert result.exit_code == 2
    assert "missing" in result.output


def test_a_recording_without_ranks_is_no_plan_of_them(path):
    result = run("lint", "--capture", path)
    assert result.exit_code == 2
    assert "from_capture: there is no call of ContextParallel.plan" in result.output


def test_something_has_to_be_judged():
    result = run("lint")
    assert result.exit_code == 2
    assert "a PLAN or --capture must be given" in result.output
