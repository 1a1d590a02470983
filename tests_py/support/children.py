# SPDX-License-Identifier: Apache-2.0
"""Processes that a test starts; none of them outlives the test."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audit import leftovers
from support.time_limits import PATIENCE

_MARK = "CPATTN_TEST_CHILDREN"


def restore_signals() -> None:
    """Let Ctrl-C work here and in processes started from here.

    A job in the background of a shell script ignores SIGINT and SIGQUIT, a job under nohup ignores
    SIGHUP, and all processes that it starts ignore them, too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})


def path_with(*folders: Path | str) -> str:
    """Return a PYTHONPATH by which a child finds these folders first, then this process's."""
    return os.pathsep.join([*map(str, folders), *filter(None, sys.path)])


class Children:
    """Starts processes in new sessions; `close` ends them and all processes that they started."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """Start a process like `subprocess.Popen`, with text pipes and an empty stdin."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = (options.pop("env", None) or os.environ) | {_MARK: self._mark}
        options = {"text": True, **pipes} | options
        process = subprocess.Popen(
            list(map(os.fspath, command)), env=environment, start_new_session=True, **options
        )
        self._processes.append(process)
        return process

    def run(
        self, command: Sequence[Any], *, timeout: float = PATIENCE, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a process like `subprocess.run`; end it and raise an error if it takes too long."""
        process = self.start(command, **options)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def python(self, code: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run code in a new interpreter that finds what this one finds; it must end well."""
        done = self.run([sys.executable, "-c", code], **options)
        assert done.returncode == 0, done.stderr
        return done

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        # Some start others in new sessions, like torchrun its ranks.
        while left := leftovers.marked(f"{_MARK}={self._mark}"):
            leftovers.end(left)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
