# SPDX-License-Identifier: Apache-2.0
"""Worker processes that start together and end together, in any case.

    with Workers([Role("a worker", "package.module.Class", 0, config)]) as workers:
        workers.call([0], "method")
        (answer,) = workers.answers([0])

torch is not imported here: a worker sets its environment before it imports the module of its role.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from cpattn_terminal.end_with import end_with

from .hosts import INTERFACE, enter


@dataclass(frozen=True)
class Role:
    """Task of a process: ``<target>(rank, config, init_method)``, a context manager, answers its
    calls. If it has a ``tell``, that becomes ``tell(what, share)``: what it is doing, and which
    part of the call is done."""

    name: str  # messages use it
    target: str  # module.name
    rank: int
    config: Any
    namespace: str | None = None  # path from `Hosts.path` to its host; None: this host


class WorkerError(RuntimeError):
    """A worker ended or failed; the message names it and the reason."""


class Workers:
    """Process for each role; a context manager that leaves no process behind.

    Only the parent receives Ctrl-C, and ends the workers; a worker whose parent has ended finds its
    pipe closed and ends itself. Worker numbers follow the order of the roles.

    `told` receives reports of a worker while its answer is awaited.
    """

    def __init__(
        self, roles: Sequence[Role], told: Callable[[str, float], None] = lambda what, share: None
    ) -> None:
        self.told = told
        self._roles = roles
        self._directory = tempfile.TemporaryDirectory(prefix="cpattn-replay-")
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> Workers:
        try:
            self._start()
            for i in range(len(self._roles)):
                self.told(f"{i} of {len(self._roles)} processes are ready", 0.0)
                self.answers([i])  # each reports its start
        except BaseException:
            with _interrupts_blocked():
                self._end(patience=0.0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _interrupts_blocked():
            self._end(patience=5.0 if kind is None else 0.0)

    def numbered(self, target: str) -> list[int]:
        """Return the numbers of the workers with this role."""
        return [i for i, role in enumerate(self._roles) if role.target == target]

    def call(self, workers: Iterable[int], method: str, *arguments: Any) -> None:
        """Call a method of workers. Each answers, and takes its next call after the answer."""
        for i in workers:
            try:
                self._pipes[i].send((method, arguments))
            except OSError:
                break  # a dead reader, which `answers` names

    def answers(self, workers: Iterable[int]) -> list[Any]:
        """Return the answer of each to its oldest call. WorkerError if any worker has failed."""
        workers = list(workers)
        answers: dict[int, Any] = {}
        while len(answers) < len(workers):
            missing = [i for i in workers if i not in answers]
            ready = connection.wait(
                [self._pipes[i] for i in missing]
                + [process.sentinel for process in self._processes]
            )
            for i in missing:
                if self._pipes[i] in ready:
                    kind, answer = self._receive(i)
                    if kind == "told":
                        self.told(*answer)
                    else:
                        answers[i] = answer
            self._check_alive()
        return [answers[i] for i in workers]

    def _start(self) -> None:
        context = get_context("spawn")
        store = Path(self._directory.name) / "store"
        # A signal blocked here stays blocked in the workers from the start; a handler in them would
        # come too late. The tracker process would unblock it if it started later.
        resource_tracker.ensure_running()
        with _interrupts_blocked():
            for role in self._roles:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve,
                    args=(role, f"file://{store}", theirs),
                    name=f"cpattn-{role.name.replace(' ', '-')}",
                    daemon=True,
                )
                self._pipes.append(ours)
                process.start()
                self._processes.append(process)
                theirs.close()

    def _receive(self, i: int) -> tuple[str, Any]:
        name = self._roles[i].name
        try:
            kind, answer = self._pipes[i].recv()
        except (EOFError, OSError):
            self._processes[i].join(5)
            self._check_alive()
            raise WorkerError(f"{name} closed its pipe") from None
        if kind == "failed":
            # Losing a peer is an error in the others: the error of the peer is the better message.
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                self._check_alive()
                time.sleep(0.02)
            raise WorkerError(f"{name} failed: {answer}")
        return kind, answer

    def _check_alive(self) -> None:
        for role, process in zip(self._roles, self._processes, strict=False):
            code = process.exitcode
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended"
                detail = f" with exit code {code}" if code >= 0 else ""
                raise WorkerError(f"{role.name} (process {process.pid}) {how}{detail}")

    def _end(self, patience: float) -> None:
        """Ask the workers to end, then terminate, then kill; reap all."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(2.0)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._directory.cleanup()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C, and other signals with a handler, until the end of the block.

    Processes started in the block keep Ctrl-C blocked. For this process, blocking is not enough: a
    thread without the block may take a signal, and its handler still runs here.
    """
    waiting: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(signal.getsignal(number)):
                    handlers[number] = signal.signal(number, lambda *call: waiting.append(call))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for handled, handler in handlers.items():
            signal.signal(handled, handler)
    for call in waiting[:1]:
        handlers[call[0]](*call)


def serve(role: Role, init_method: str, pipe: connection.Connection) -> None:
    """Run a worker: set up, then answer calls until the pipe closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if role.namespace:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the parent reports what happened
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the engine is imported
    try:
        if role.namespace:
            parent = parent_process()
            assert parent
            assert parent.pid
            end_with(parent.pid)
            enter(role.namespace)
        module, _, name = role.target.rpartition(".")
        make = getattr(import_module(module), name)
        with make(role.rank, role.config, init_method) as worker:
            if hasattr(worker, "tell"):
                worker.tell = lambda *news: pipe.send(("told", news))
            pipe.send(("ready", None))
            while True:
                method, arguments = pipe.recv()
                pipe.send(("done", getattr(worker, method)(*arguments)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent has closed the pipe, so the worker ends. Without freeze, Python would scan all
        # objects of torch once more, for half a second.
        gc.freeze()
    except Exception as error:  # the parent reports it; tracebacks of all ranks would be noise
        summary = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        with suppress(EOFError, OSError):
            pipe.send(("failed", summary))
            pipe.recv_bytes()  # until the parent has decided
