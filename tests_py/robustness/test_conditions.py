# SPDX-License-Identifier: Apache-2.0
"""The tests that depend most on their surroundings pass in surroundings that are odd."""

from __future__ import annotations

import os
import re
import sys

import pytest

from audit import machine
from support.places import ROOT

pytestmark = pytest.mark.slow


# Processes, signals, terminals, tensors between processes.
TESTS = (
    "distributed/test_distributed.py::test_interrupt_ends_a_wait",
    "distributed/test_distributed.py::test_one_token_leaves_other_ranks_without_rows",
    "robustness/test_nested_calls.py::test_ctrl_c_ends_the_call",
    "cli/test_cli.py::test_ctrl_c_ends_all_processes_with_one_line[run]",
)
# As under nohup or in the background of a script, without standard input, and where the folder
# of a script is not on the path. Folders of modules are shadowed where a file may be found instead.
BACKGROUND = "trap '' HUP INT QUIT; export PYTHONSAFEPATH=1; exec \"$@\" <&-"
LITTLE_SHARED_MEMORY = f"mount -t tmpfs -o size=20m none /dev/shm && {BACKGROUND}"


def start(children, *prefix):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-skips"]
    tests = [f"tests_py/{test}" for test in TESTS]
    return children.start([*prefix, *command, *tests], cwd=ROOT, env=environment)


def all_pass(process):
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    assert re.match(r"\d+ passed(, \d+ warnings?)? in", out.splitlines()[-1]), out


def test_two_runs_at_once_in_odd_surroundings(children):
    """One runs in the background with little shared memory, one as a user who has no home and may
    write nowhere but in temporary folders."""
    mounts, user = machine.own_mounts(), machine.another_user()
    background = ["sh", "-c", LITTLE_SHARED_MEMORY if mounts else BACKGROUND, "sh"]
    runs = [
        start(children, *(mounts or []), *background),
        start(children, *(user or []), "env", "HOME=/nonexistent"),
    ]
    for process in runs:
        all_pass(process)
    if mounts is None:
        pytest.skip("no mount namespaces here")
    if user is None:
        pytest.skip("only root can be another user")
