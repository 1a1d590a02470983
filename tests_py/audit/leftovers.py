# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: no test, and no run, leaves a process or shared memory behind. Processes carry
a mark of their run in their environment, by which orphans are found at its end."""

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
PATIENCE = 10.0  # seconds for what is about to end
# They serve all tests of a process, and end when it does.
_SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def children_of(pid: int) -> set[int]:
    """Return the children of all its threads, and the dead ones that nobody has waited for."""
    found: set[int] = set()
    for path in PROC.glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def state_of(pid: int) -> str:
    """Return the state in /proc/PID/stat; "Z" for the dead, even those nobody knows any more."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _strings(pid: int, name: str) -> list[str]:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:  # gone, or another user's
        return []


def _is_servant(pid: int) -> bool:
    return any(servant in part for part in _strings(pid, "cmdline") for servant in _SERVANTS)


def marked(mark: str) -> set[int]:
    """The processes with a string such as "NAME=value" in the environment they started with."""
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
    """Shared memory with a name, by whichever process."""
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def used_by_others(path: Path, mark: str) -> bool:
    """Return whether a process that is not of this run has mapped it, under whichever name."""
    try:
        file = path.stat()
    except FileNotFoundError:
        return True  # it was theirs, and is gone
    if file.st_uid != os.geteuid():
        return True  # of another user, whose processes do not show what they have mapped
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
        """Return the living processes of this run, but for those that end with us."""
        mine = children_of(os.getpid())
        servants = {pid for pid in mine if _is_servant(pid)}
        return {p for p in mine | marked(self._mark) if state_of(p) != "Z"} - servants

    def new_segments(self) -> set[Path]:
        new = segments() - self._segments
        return {path for path in new if not used_by_others(path, self._mark)}

    @pytest.hookimpl(trylast=True)  # when fixtures and the workers of xdist have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        deadline = time.monotonic() + PATIENCE
        unused = self.new_segments()  # of others are those that somebody maps in the meantime
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
    """Around every test: what it started has ended when its own fixtures have."""

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
