# SPDX-License-Identifier: Apache-2.0
"""Errors of all ranks after faults at any call, by any exchange; a soak has many more rounds."""

import os
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from support.distributed import random_faults
from support.distributed.fault_rounds import FAULTS, draw
from support.distributed.fault_worlds import Answer, Outcome
from support.engine_runs import run_module
from support.time_limits import BUSY, PATIENCE

ROUNDS = 33


@pytest.mark.slow
def test_every_fault_by_two_transports():
    """`python -m support.distributed.random_faults --in-turns --only N` runs one round again."""
    seed = os.environ.get("CPATTN_FAULT_SEED", "0")
    options = ("--in-turns", f"--rounds={ROUNDS}", f"--seed={seed}")
    printed = run_module(random_faults.__name__, *options, timeout=20 * PATIENCE)
    summary = re.search(r"(\d+) rounds in \d+ s, 0 failed: (.*)", printed)
    assert summary is not None
    assert int(summary[1]) == ROUNDS
    assert set(FAULTS) <= set(re.findall(r"\d+ ([a-z ]+)", summary[2]))


ROUND = replace(draw(1, fault="kill"), size=3, culprit=2, transport="shm", exchange="rows")
TOLD = "RuntimeError: ContextParallel.gather: rank 2 of 3 did not answer: its process has ended"
BOTH_TOLD = f"{TOLD.replace('rank 2', 'rank 0, 2')}, process 7 has ended"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(error=TOLD, told=10.5), None),
        (Answer(), "had no error"),
        (Answer(error=TOLD, told=11 + BUSY + 0.1), "was told later than 1 s"),
        (Answer(error=TOLD.replace("rank 2", "rank 1"), told=10.5), "does not name the culprit"),
        (Answer(error=BOTH_TOLD, told=10.5), None),
        (Answer(error=TOLD, told=10.5, left_behind=("1 threads",)), "left behind: 1 threads"),
    ],
)
def test_what_is_wrong_with_a_survivor_is_found(answer, complaint):
    answers = [Answer(error=TOLD, told=10.1), answer, Answer(died=True)]
    found = random_faults.complaints(ROUND, Outcome(answers, 10.0))
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]
