# SPDX-License-Identifier: Apache-2.0
"""A test that leaves a process is an error, and so is a run that leaves a process or memory."""

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from audit import leftovers
from support.time_limits import PATIENCE

pytestmark = pytest.mark.slow


SLEEP = """
import subprocess

def sleep(**options):
    subprocess.Popen(["sleep", "{}"], **options)
"""
IN_A_TEST = "from sleeping import sleep\n\ndef test_a():\n    sleep()\n\ndef test_b():\n    pass\n"
ORPHAN = """
import os
from sleeping import sleep

def test_a():
    child = os.fork()
    if child == 0:
        sleep(start_new_session=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
SHARED_MEMORY = """
from multiprocessing import resource_tracker, shared_memory

def test_a():
    segment = shared_memory.SharedMemory("{}", create=True, size=10)
    resource_tracker.unregister(segment._name, "shared_memory")
    segment.close()
"""
WORKERS = pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "xdist"])


@pytest.fixture
def seconds():
    """Return the seconds that processes sleep: a number that no other command has."""
    return f"60.{uuid.uuid4().int % 10**12}"


def has_ended(seconds):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        commands = [
            leftovers._strings(int(p.name), "cmdline") for p in Path("/proc").glob("[0-9]*")
        ]
        if ["sleep", seconds] not in commands:
            return True
        time.sleep(0.05)
    return False


@WORKERS
def test_what_is_left_is_ended_and_an_error(inner_runs, workers, seconds):
    name = f"cpattn-test-{uuid.uuid4().hex}"
    inner_runs.write(sleeping=SLEEP.format(seconds), test_memory=SHARED_MEMORY.format(name))
    leaving = {"test_in_a_test": IN_A_TEST, "test_orphan": ORPHAN}
    inner_runs.write(**leaving)
    try:
        done = inner_runs.run(*workers)
        assert done.returncode == 1, done.stdout
        assert "the test has left processes:" in done.stdout
        assert "ERROR at teardown of what the run left behind" in done.stdout
        for module in leaving:
            assert f"(sleep {seconds}), started by {module}.py::test_a" in done.stdout
        assert f"shared memory /dev/shm/{name}" in done.stdout
        assert ", 2 errors" in done.stdout.splitlines()[-1]
        assert has_ended(seconds)
    finally:
        (leftovers.SHARED_MEMORY / name).unlink()


def test_shared_memory_of_others_is_theirs(children):
    path = leftovers.SHARED_MEMORY / f"cpattn-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(10))
    try:
        assert path in leftovers.segments()
        assert not leftovers.used_by_others(path, "a mark of nobody")
        script = (
            f"import mmap\nfile = open({str(path)!r}, 'r+b')\n"
            "mapped = mmap.mmap(file.fileno(), 10)\nprint('ready', flush=True)\ninput()"
        )
        other = children.start([sys.executable, "-c", script], stdin=subprocess.PIPE)
        assert other.stdout.readline() == "ready\n"
        assert leftovers.used_by_others(path, "a mark of nobody")
    finally:
        path.unlink()


def test_children_end_with_their_fixture_however_they_were_started(children, seconds):
    """A new session does not save a child, nor does ignoring signals."""
    script = f"trap '' INT TERM HUP; setsid sleep {seconds} & echo ready; wait"
    process = children.start(["sh", "-c", script])
    assert process.stdout.readline() == "ready\n"
    children.close()
    assert process.returncode == -signal.SIGKILL
    assert has_ended(seconds)
