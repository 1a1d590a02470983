# SPDX-License-Identifier: Apache-2.0
"""A process that calls all day does not grow."""

import os
import sys

import pytest

from support.api.repeated_calls import CALLS, LEAKS
from support.children import Children, path_with

pytestmark = pytest.mark.slow


TIMES = 70_000
# A process may grow by this over all calls, which is less than 16 bytes, the smallest block, for
# each call. Python's own count, over a tenth of the calls, leaves out what the allocator keeps.
RESIDENT_BYTES = 1 << 20
TRACED_BYTES = 1 << 14


def growth(children: Children, name: str) -> tuple[int, int]:
    command = [sys.executable, "-m", "support.api.repeated_calls", name, str(TIMES)]
    done = children.run(command, env=os.environ | {"PYTHONPATH": path_with()})
    assert done.returncode == 0, done.stderr
    resident, traced = map(int, done.stdout.split())
    return resident, traced


@pytest.mark.parametrize("name", CALLS)
def test_memory_does_not_grow_with_the_number_of_calls(children: Children, name: str) -> None:
    resident, traced = growth(children, name)
    assert resident < RESIDENT_BYTES
    assert traced < TRACED_BYTES


@pytest.mark.parametrize("name", LEAKS)
def test_one_object_of_each_call_would_be_seen(children: Children, name: str) -> None:
    resident, traced = growth(children, name)
    # Objects may lie in memory that was free before; Python counts them in any case.
    assert resident >= RESIDENT_BYTES or traced >= TRACED_BYTES
