# SPDX-License-Identifier: Apache-2.0
"""Implementations in child processes, asked over pipes: a crash affects nothing else."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.figures import Row
from bench.harness.worker import child_environment

ANSWER_SECONDS = 180.0


class Failed(Exception):
    """The reason for which a contender has no time, with a status."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason

    def row(self, name: str) -> Row:
        return {"implementation": name, "status": self.status, "reason": self.reason}


class Contender:
    """A child process with one implementation on a number of threads, started on first use.

    `command` runs a program that ends in `worker.serve`.
    """

    answer_seconds = ANSWER_SECONDS

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        num_threads: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._command = command
        self._environment = child_environment(OMP_NUM_THREADS=str(num_threads), **variables or {})
        self.version = ""  # of the engine; known after the first answer
        self._process: subprocess.Popen[bytes] | None = None
        self._out: Failed | None = None  # of the rest of the run

    def start(self) -> None:
        """Begin to start, without waiting for it."""
        if self._process is None and self._out is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._pipes = self._process.stdin, self._process.stdout
            self._ready = False

    def ask(self, do: str, **arguments: Any) -> Row:
        """The answer to a command. Failed if there is none; the next one starts a new process."""
        self.start()
        if self._out is not None:
            raise self._out
        if not self._ready:
            self.version = self._answer()["version"]
            self._ready = True
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it
            commands, _ = self._pipes
            commands.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            commands.flush()
        return self._answer()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None

    def _answer(self) -> Row:
        _, answers = self._pipes
        ready, _, _ = select.select([answers], [], [], self.answer_seconds)
        line = answers.readline() if ready else b""
        answer = json.loads(line) if line else {}
        if not ready:
            raise self._leave(Failed("timeout", f"no answer within {self.answer_seconds:.0f} s"))
        if not line:
            raise self._crash()
        if "missing" in answer:
            raise self._leave(Failed("not installed", answer["missing"]))
        for status in ("unsupported", "error"):
            if status in answer:
                raise Failed(status, answer[status])
        return answer

    def _leave(self, reason: Failed) -> Failed:
        self.stop()
        self._out = reason
        return reason

    def _crash(self) -> Failed:
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:  # it closed its output and hangs
            self._process.kill()
            code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        failed = Failed("crashed", ": ".join([how, *said]))
        if not self._ready:  # it would again
            return self._leave(failed)
        self.stop()
        return failed
