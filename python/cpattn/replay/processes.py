# SPDX-License-Identifier: Apache-2.0
"""The worker processes, one per rank: started together, ended together, whatever happens.

torch is not imported here: a worker sets its environment before it imports `cpattn.replay.worker`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .scheduler import Batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from .model import DecoderConfig
    from .worker import RankResult


class WorkerError(RuntimeError):
    """A worker ended, or failed; the message names its rank and says how."""


@dataclass(frozen=True)
class WorkerConfig:
    """What every rank is told once."""

    model: DecoderConfig
    cp_size: int
    strategy: str
    page_size: int
    num_pages: int
    num_threads: int
    torch_baseline: bool
    timeout_seconds: float


@dataclass(frozen=True)
class Work:
    """What every rank is told for one batch."""

    batch: Batch
    token_ids: npt.NDArray[Any]  # int64 [new tokens]
    rows: npt.NDArray[Any]  # int64: rows of the result that are wanted back


class Workers:
    """`cp_size` processes; a context manager, on whose exit none of them is left.

    Ctrl-C reaches the parent alone, which ends the workers; a worker whose parent is gone finds
    its pipe closed and ends itself.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._directory = tempfile.TemporaryDirectory(prefix="cpattn-replay-")
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> Workers:
        try:
            self._start()
            self._collect()  # each says that it is ready
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

    def run(self, work: Work) -> list[RankResult]:
        """Run one batch on all ranks; the results in rank order. WorkerError if one fails."""
        for pipe in self._pipes:
            try:
                pipe.send(work)
            except OSError:
                break  # a dead reader; _collect says which
        return self._collect()

    def _start(self) -> None:
        context = get_context("spawn")
        store = Path(self._directory.name) / "store"
        # A blocked signal stays blocked in the workers from their first instruction on, where a
        # handler would come too late. The tracker process would unblock it if it came second.
        resource_tracker.ensure_running()
        with _interrupts_blocked():
            for rank in range(self._config.cp_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve,
                    args=(rank, self._config, f"file://{store}", theirs),
                    name=f"cpattn-rank-{rank}",
                    daemon=True,
                )
                self._pipes.append(ours)
                process.start()
                self._processes.append(process)
                theirs.close()

    def _collect(self) -> list[Any]:
        """One answer from each rank."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._processes):
            missing = [rank for rank in range(len(self._processes)) if rank not in answers]
            ready = connection.wait(
                [self._pipes[rank] for rank in missing]
                + [process.sentinel for process in self._processes]
            )
            for rank in missing:
                if self._pipes[rank] in ready:
                    answers[rank] = self._receive(rank)
            self._check_alive()
        return [answers[rank] for rank in range(len(self._processes))]

    def _receive(self, rank: int) -> Any:
        try:
            kind, answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(5)
            self._check_alive()
            raise WorkerError(f"rank {rank} closed its pipe") from None
        if kind == "failed":
            # Losing a peer is an error in the others: what ended the peer is the better message.
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                self._check_alive()
                time.sleep(0.02)
            raise WorkerError(f"rank {rank} failed: {answer}")
        return answer

    def _check_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            code = process.exitcode
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended"
                detail = f" with exit code {code}" if code >= 0 else ""
                raise WorkerError(f"rank {rank} (process {process.pid}) {how}{detail}")

    def _end(self, patience: float) -> None:
        """Ask, then terminate, then kill; reap all."""
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
    """Ctrl-C waits until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(rank: int, config: WorkerConfig, init_method: str, pipe: connection.Connection) -> None:
    """A worker's life: set up, then answer batches until the pipe closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the parent says what happened
    try:
        from .worker import Rank

        with Rank(rank, config, init_method) as this:
            pipe.send(("ready", None))
            while True:
                work = pipe.recv()
                pipe.send(("done", this.run(work)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the pipe: the end
    except Exception as error:  # the parent reports it; a traceback of each rank would be noise
        summary = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        with suppress(EOFError, OSError):
            pipe.send(("failed", summary))
            pipe.recv_bytes()  # until the parent has decided
