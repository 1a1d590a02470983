# SPDX-License-Identifier: Apache-2.0
"""Processes that a test starts, none of which outlives it."""

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
    """Let Ctrl-C work here and in processes started from here, whatever started us.

    A shell that starts a job in the background of a script has it ignore SIGINT and SIGQUIT, nohup
    has it ignore SIGHUP, and what is ignored stays so in all that it starts.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})


def path_with(*folders: Path | str) -> str:
    """A PYTHONPATH by which a child finds these folders first, then all that we find."""
    return os.pathsep.join([*map(str, folders), *filter(None, sys.path)])


class Children:
    """Starts processes in sessions of their own; `close` ends them and all that they started."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """Start a process as `subprocess.Popen`: with pipes of text, and an empty stdin."""
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
        """Run a process as `subprocess.run`; one that takes too long is ended, and an error."""
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
        # Some start others in sessions of their own, as torchrun does its ranks.
        while left := leftovers.marked(f"{_MARK}={self._mark}"):
            leftovers.end(left)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
