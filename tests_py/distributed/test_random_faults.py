# SPDX-License-Identifier: Apache-2.0
"""Ranks to which anything happens at any time: what the others are told, and what is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from support.children import path_with
from support.distributed import random_faults
from support.distributed.distributed_worker import run_world
from support.distributed.fault_groups import run_two_groups_and_a_loss
from support.distributed.fault_rounds import FAULTS, Round, draw
from support.distributed.fault_worlds import Answer, Outcome
from support.time_limits import BUSY

pytestmark = pytest.mark.slow

ROUNDS, SECONDS = 200, 240


def test_random_faults():
    """The seed is that of a release; another one by CPATTN_FAULT_SEED, one round by `--only`."""
    seed = int(os.environ.get("CPATTN_FAULT_SEED", "1"))
    result = subprocess.run(
        [sys.executable, "-m", random_faults.__name__, "--rounds", str(ROUNDS),
         "--seconds", str(SECONDS), "--seed", str(seed)],
        env=os.environ | {"PYTHONPATH": path_with()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    summary = re.search(r"(\d+) rounds in \d+ s, 0 failed: (.*)", result.stdout)
    assert summary is not None
    assert set(FAULTS) <= set(re.findall(r"\d+ ([a-z ]+)", summary[2])) or int(summary[1]) < ROUNDS


def test_two_groups_on_a_host_of_which_one_loses_a_rank(tmp_path):
    """Ranks 0, 1 and 2, 3, with pools of their own: the second pair never notices."""
    lost, killed, *others = run_world(4, tmp_path, run_two_groups_and_a_loss)
    assert killed is None
    assert re.match(
        r"RuntimeError: ContextParallel\.write_kv.*: rank 1 of 2 did not answer: "
        r"process \d+ has ended",
        lost[0],
    )
    assert lost[1] < 1 + BUSY
    assert others == [("no error", 0.0)] * 2


ROUND = replace(draw(1, fault="kill"), size=3, culprit=2, transport="shm", exchange="rows")
TOLD = "RuntimeError: ContextParallel.gather: rank 2 of 3 did not answer: its process has ended"

BOTH_TOLD = f"{TOLD.replace('rank 2', 'rank 0, 2')}, process 7 has ended"


def complaints_of(one: Round, *answers: Answer, at: float = 10.0) -> list[str]:
    return random_faults.complaints(one, Outcome(list(answers), at))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(error=TOLD, told=10.5), None),
        (Answer(), "had no error"),
        (Answer(died=True), "died, which had no fault"),
        (Answer(error=TOLD, told=11 + BUSY + 0.1), "was told later than 1 s"),
        (Answer(error=TOLD.replace("rank 2", "rank 1"), told=10.5), "does not name the culprit"),
        (Answer(error=TOLD.replace("rank 2", "rank 0, 2"), told=10.5), "also names others"),
        (
            Answer(error=f"{TOLD.replace('rank 2', 'rank 0, 2')}, process 7 has ended", told=10.5),
            None,
        ),
        (Answer(error="RuntimeError: broken pipe", told=10.5), "does not name the call"),
        (Answer(error=TOLD, told=10.5, left_behind=("1 threads",)), "left behind: 1 threads"),
    ],
)
def test_what_is_wrong_with_a_survivor_is_found(answer, complaint):
    found = complaints_of(ROUND, Answer(error=TOLD, told=10.1), answer, Answer(died=True))
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]


def test_a_rank_is_not_late_where_nobody_was_let_run():
    late = Answer(error=TOLD, told=11 + BUSY + 0.1)
    outcome = Outcome([late, late, Answer(died=True)], 10.0, stalled=0.04)
    assert random_faults.complaints(ROUND, outcome) == []
    assert len(random_faults.complaints(ROUND, outcome._replace(stalled=0.03))) == 2
    outcome = outcome._replace(stalled=1.0, left_behind=("process 7",))
    assert random_faults.complaints(ROUND, outcome) == ["left behind: process 7"]


def test_an_error_without_a_fault_is_found():
    for one, at in ((replace(ROUND, fault="none"), 10.0), (ROUND, 0.0)):
        (found,) = complaints_of(one, Answer(), Answer(error=TOLD), Answer(), at=at)
        assert found.startswith("rank 1 failed without a fault")


def test_rounds_come_again_from_their_seeds():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert {draw(seed).fault for seed in range(300)} == set(FAULTS)
    assert str(ROUND).startswith("seed 1: rows x ")
