# SPDX-License-Identifier: Apache-2.0
"""The command `cpattn` as users start it: a process with streams, signals and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from audit import leftovers
from support.children import Children
from support.time_limits import PATIENCE

COMMAND = [sys.executable, "-m", "cpattn"]
# A replay of some seconds, most of them for importing torch.
QUICK = [
    *("replay", "--requests=12", "--scale-lengths=64", "--page-size=4", "--pool-tokens=3000"),
    *("--token-budget=300", "--layers=2", "--hidden-size=64", "--heads=4", "--head-dim=16"),
    "--intermediate-size=96",
]


class Running:
    """Command in a new session; some of its streams may be a terminal."""

    def __init__(
        self,
        children: Children,
        arguments: list[str],
        columns: int | None,
        streams: tuple[str, ...] = ("stderr",),
        term: str = "xterm",
        **options: Any,
    ) -> None:
        self._master = None
        env = (options.pop("env", None) or os.environ) | {"OMP_NUM_THREADS": "1"}  # others spin
        if columns:
            self._master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            options |= dict.fromkeys(streams, slave)
            env = {**env, "TERM": term}
            env.pop("COLUMNS", None)
        self.process = children.start(arguments, env=env, **options)
        self.pid = self.process.pid
        self._written, self._taken = b"", 0
        self._news = threading.Condition()
        self._ended = not columns
        if columns:
            os.close(slave)
            threading.Thread(target=self._read, name="terminal", daemon=True).start()

    def _read(self) -> None:
        """Read what the command writes to its terminal, which would block the command if full."""
        while not self._ended:
            try:
                written = os.read(self._master, 4096)
            except OSError:  # the other side is closed
                written = b""
            with self._news:
                self._written += written
                self._ended = not written
                self._news.notify_all()

    def read_until(self, text: bytes, seconds: float = PATIENCE) -> bytes:
        """Return what the command has written to its terminal since the last call, up to `text`."""
        with self._news:
            self._news.wait_for(
                lambda: self._ended or text in self._written[self._taken :], timeout=seconds
            )
            seen = self._written[self._taken :]
            self._taken += len(seen)
        return seen

    def interrupt(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def close(self) -> None:
        if self._master is not None:
            with self._news:
                self._news.wait_for(lambda: self._ended, timeout=PATIENCE)
            os.close(self._master)


class CommandLine:
    """Starts commands; a context manager that leaves none of their processes behind."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._running: list[Running] = []

    def __enter__(self) -> CommandLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()
        for running in self._running:
            running.close()

    def _start(self, arguments: list[str], columns: int | None, **options: Any) -> Running:
        self._running.append(Running(self._children, arguments, columns, **options))
        return self._running[-1]

    def start(self, *arguments: str, columns: int | None = None, **options: Any) -> Running:
        """Start a command; with `columns` its stderr is a terminal of that width."""
        return self._start([*COMMAND, *arguments], columns, **options)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return self._ended(self.start(*arguments, **options))

    def shell(
        self, text: str, *, pipefail: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command with `text` behind it, such as redirections, in a shell to its end."""
        script = f"{'set -o pipefail; ' * pipefail}{shlex.join(COMMAND)} {text}"
        return self._ended(self._start(["bash", "-c", script], None, **options))

    def _ended(self, running: Running) -> subprocess.CompletedProcess[str]:
        process = running.process
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Any:
    """Run a command in this process; return click's `Result`."""
    from click.testing import CliRunner

    from cpattn_terminal.commands import commands

    return CliRunner(env=env).invoke(commands, arguments, prog_name="cpattn")


class Reached(Exception):
    """A command has reached the begin of its long work."""


#: Functions that do the long work of commands.
BEGINNINGS = (
    "cpattn_lab.replay.driver.replay", "cpattn_proof.simulation.simulate.simulate_script",
    "cpattn_proof.simulation.recorded.simulate_capture", "cpattn_proof.commands.zoo.visit",
    "cpattn_proof.conformance.runner.conform",
)  # fmt: skip


def invoke_to_beginning(*arguments: str, env: dict[str, str] | None = None) -> Any:
    """Run a command up to the begin of its long work; return click's `Result`."""
    with contextlib.ExitStack() as stack:
        for name in BEGINNINGS:
            stack.enter_context(mock.patch(name, side_effect=Reached))
        return invoke(*arguments, env=env)


def run_on_terminal(line: CommandLine, columns: int, *arguments: str, **options: Any) -> list[str]:
    """Return the lines that a command writes to a terminal, which has both its streams."""
    env = {**os.environ, "TERM": "xterm", **options.pop("env", {})}
    terminal = {"streams": ("stdin", "stdout", "stderr"), "term": env["TERM"]}
    running = line.start(*arguments, columns=columns, env=env, **terminal, **options)
    running.process.wait(PATIENCE)
    return running.read_until(b"\0").decode().replace("\r\n", "\n").split("\n")


def workers_of(pid: int) -> list[int]:
    """Return the worker processes of a command."""
    return [x for x in leftovers.children_of(pid) if "spawn_main" in leftovers.describe(x)]


def _is_of_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and leftovers.state_of(pid) != "Z"
    except ProcessLookupError:
        return False


def left_of_session(session: int, seconds: float = 10) -> list[str]:
    """Return the processes of a session that are left after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        found = [leftovers.describe(pid) for pid in pids if _is_of_session(pid, session)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
