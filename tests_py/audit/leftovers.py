# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: no test and no run may leave processes or shared memory behind. Processes have
a mark of their run in their environment, by which its end finds orphans."""

import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from audit import fail_run

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
_MARK = "CPATTN_TEST_RUN"
PATIENCE = 10.0  # seconds for processes that are about to end
# Servants of all tests of a process, which end with it.
_SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def children_of(pid: int) -> set[int]:
    """Return the children of all threads of a process, also dead ones that are not reaped."""
    found: set[int] = set()
    for path in PROC.glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def state_of(pid: int) -> str:
    """Return the state in /proc/PID/stat; "Z" for dead and for unknown processes."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _strings(pid: int, name: str) -> list[str]:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def _is_servant(pid: int) -> bool:
    return any(servant in part for part in _strings(pid, "cmdline") for servant in _SERVANTS)


def marked(mark: str) -> set[int]:
    """Return the processes that started with a string such as "NAME=value" in the environment."""
    pids = {int(path.name) for path in PROC.glob("[0-9]*")} - {os.getpid()}
    return {pid for pid in pids if mark in _strings(pid, "environ") and state_of(pid) != "Z"}


def describe(pid: int) -> str:
    test = [s for s in _strings(pid, "environ") if s.startswith("PYTEST_CURRENT_TEST=")]
    by = f", started by {test[0].partition('=')[2]}" if test else ""
    return f"process {pid} ({' '.join(_strings(pid, 'cmdline'))[:200]}){by}"


def end(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def segments() -> set[Path]:
    """Return named shared memory of all processes."""
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def used_by_others(path: Path, mark: str) -> bool:
    """Return whether a process outside of this run has mapped the file, under any name."""
    try:
        file = path.stat()
    except FileNotFoundError:
        return True  # another process has removed it
    if file.st_uid != os.geteuid():
        return True  # processes of other users do not show their maps
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    where = re.compile(rf" {device} {file.st_ino}\s", re.MULTILINE)
    own = marked(mark) | {os.getpid()}
    for maps in PROC.glob("[0-9]*/maps"):
        if int(maps.parent.name) not in own:
            with contextlib.suppress(OSError):
                if where.search(maps.read_text(errors="replace")):
                    return True
    return False


class Leftovers:
    def __init__(self) -> None:
        os.environ[_MARK] = uuid.uuid4().hex
        self._mark = f"{_MARK}={os.environ[_MARK]}"
        self._segments = segments()

    def processes(self) -> set[int]:
        """Return the living processes of this run, without servants."""
        mine = children_of(os.getpid())
        servants = {pid for pid in mine if _is_servant(pid)}
        return {p for p in mine | marked(self._mark) if state_of(p) != "Z"} - servants

    def new_segments(self) -> set[Path]:
        new = segments() - self._segments
        return {path for path in new if not used_by_others(path, self._mark)}

    @pytest.hookimpl(trylast=True)  # fixtures and workers of xdist must have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        deadline = time.monotonic() + PATIENCE
        unused = self.new_segments()  # segments that others map meanwhile are not this run's
        while ((left := self.processes()) or unused) and time.monotonic() < deadline:
            time.sleep(0.05)
            unused &= self.new_segments()
        said = [describe(pid) for pid in sorted(left)]
        end(left)
        said += [f"shared memory {path}" for path in sorted(unused & segments())]
        if said:
            fail_run(session, "what the run left behind", "\n".join(said))


_before = pytest.StashKey[set[int]]()


class Tests:
    """Plug-in around every test: its processes must have ended when its own fixtures have."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        item.stash[_before] = children_of(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        if _before in item.stash and (left := self._left(item.stash[_before])):
            said = "\n".join(map(describe, sorted(left)))
            end(left)
            pytest.fail(f"the test has left processes:\n{said}", pytrace=False)

    def _left(self, before: set[int]) -> set[int]:
        deadline = time.monotonic() + PATIENCE
        while True:
            new = {pid for pid in children_of(os.getpid()) - before if state_of(pid) != "Z"}
            new = {pid for pid in new if not _is_servant(pid)}
            if not new or time.monotonic() > deadline:
                return new
            time.sleep(0.02)


def configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tests(), "cpattn-tests-leave-nothing")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Leftovers(), "cpattn-leftovers")
