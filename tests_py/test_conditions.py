# SPDX-License-Identifier: Apache-2.0
"""The tests that depend most on their surroundings pass in surroundings that are odd."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from audit import machine

ROOT = Path(__file__).parents[1]
# Processes, signals, terminals, tensors between processes.
TESTS = (
    "test_distributed.py::test_interrupt_ends_a_wait",
    "test_distributed.py::test_one_token_leaves_other_ranks_without_rows",
    "test_indexer_runtime.py::test_ctrl_c_ends_a_long_call",
    "test_cli.py::test_ctrl_c_ends_all_processes_with_one_line[run]",
)
# As under nohup or in the background of a script, without standard input, and where the folder
# of a script is not on the path. Folders of modules are shadowed where a file may be found instead.
BACKGROUND = "trap '' HUP INT QUIT; export PYTHONSAFEPATH=1; exec \"$@\" <&-"
LITTLE_SHARED_MEMORY = f"mount -t tmpfs -o size=20m none /dev/shm && {BACKGROUND}"


def run(children, prefix, script):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-skips"]
    tests = [f"tests_py/{test}" for test in TESTS]
    shell = ["sh", "-c", script, "sh"]
    done = children.run([*prefix, *shell, *command, *tests], cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout.splitlines()[-1], done.stdout


def test_in_the_background_without_standard_input_and_on_a_safe_path(children):
    run(children, [], BACKGROUND)


def test_with_little_shared_memory(children):
    prefix = machine.own_mounts()
    if prefix is None:
        pytest.skip("no mount namespaces here")
    run(children, prefix, LITTLE_SHARED_MEMORY)
