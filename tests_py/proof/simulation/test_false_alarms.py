# SPDX-License-Identifier: Apache-2.0
"""Random programs without a fault have no findings; `make false-alarms-programs` tries many."""

from __future__ import annotations

import warnings

import pytest

from cpattn.proof import NotUsable
from support.proof.random_programs import Program, alarm_of

SEED, NUM_PROGRAMS = 3, 20


@pytest.mark.parametrize("number", range(NUM_PROGRAMS))
def test_right_programs_are_proved(number, one_torch_thread):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says it of names that it has newer ones for
        assert alarm_of(Program(SEED, number)) is None


def test_a_step_that_a_rank_leaves_out_is_found(one_torch_thread):
    """In most of them: a rank may leave out what its group does not do, or what is of one rank."""
    found = 0
    for number in range(NUM_PROGRAMS):
        try:
            found += not Program(SEED, number, damaged=True).report().proved
        except NotUsable:  # ranks of ContextParallel raise where another one has left
            found += 1
    assert found > NUM_PROGRAMS // 2
