# SPDX-License-Identifier: Apache-2.0
"""Worlds of forked ranks with a fault, and the answers and leftovers of each rank; the process that
forks has already imported and computed all it can, and has no threads."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import selectors
import signal
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from support.distributed.fault_programs import Program, expected_of_step
from support.distributed.fault_rounds import AHEAD, CASES, PATIENCE, TIMEOUT, Round
from support.distributed.fault_triggers import Trigger
from support.distributed.prefill_batches import expected_of

_PR_SET_CHILD_SUBREAPER = 36
_LATE = 2.0  # seconds beyond the timeout
_LOOK = 0.005  # seconds between two looks at the ranks


class Answer(NamedTuple):
    """The answer of a rank; `died` is set if it gave none."""

    died: bool = False
    error: str | None = None
    call: str = ""
    told: float = 0.0
    refusals: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """Answers of a round, the time of its fault (0 if none came), and leftovers of ranks."""

    answers: list[Answer]
    fault_time: float = 0.0
    left_behind: tuple[str, ...] = ()
    stalled: float = 0.0  # seconds for which the system did not let this process run


def run_round(one: Round) -> Outcome:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to this process
    board = multiprocessing.RawValue("d")  # time of the fault, by the clock that all share
    pids: list[int] = []
    pipes: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(one.size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_rank(one, rank, Path(folder) / "store", board, writer)
            os.close(writer)
            pids.append(pid)
            pipes.append(reader)
        try:
            texts, stalled = _read_all(one, pipes, pids, board)
        finally:
            for pid in pids:
                _kill(pid)
    left_behind = tuple(_orphans())
    answers = [pickle.loads(text) if text else Answer(died=True) for text in texts]
    return Outcome(answers, board.value, left_behind, stalled)


def _read_all(
    one: Round, pipes: list[int], pids: list[int], board: Any
) -> tuple[list[bytes], float]:
    """Read the answers of ranks until they end; meanwhile continue or kill a stopped rank."""
    texts = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + 2 * PATIENCE
    stopped_at = stalled = 0.0
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            if time.monotonic() > deadline:
                break  # ranks without an answer are killed
            begin = time.monotonic()
            ready = selector.select(_LOOK)
            stalled += max(0.0, time.monotonic() - begin - _LOOK - 0.001)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                texts[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
            if one.fault.startswith("stop") and board.value and not stopped_at:
                stopped_at = time.monotonic()
            lasts = {"stop": TIMEOUT + _LATE, "stop and kill": 0.1}.get(one.fault, one.delay)
            if stopped_at and time.monotonic() > stopped_at + lasts:
                kill = one.fault == "stop and kill"
                os.kill(pids[one.culprit], signal.SIGKILL if kill else signal.SIGCONT)
    return [texts[pipe] for pipe in pipes], stalled


def _kill(pid: int) -> None:
    """Kill and reap a process, which may have ended."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _orphans() -> list[str]:
    """Return processes that ranks have left behind, and kill them."""
    found = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in children:
                found.append(f"process {child}")
                _kill(int(child))


def _be_rank(one: Round, rank: int, store: Path, board: Any, writer: int) -> None:
    """Run a forked rank to its end; this never returns."""
    try:
        os.write(writer, pickle.dumps(_answer(one, rank, store, board)))
    finally:
        os._exit(0)


def _answer(one: Round, rank: int, store: Path, board: Any) -> Answer:
    warnings.simplefilter("error")
    before = resources()
    trigger = Trigger(one, board)
    program = Program(one, rank, trigger)
    error, told = None, 0.0
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), one.size), rank=rank, world_size=one.size,
            timeout=timedelta(seconds=PATIENCE),
        )  # fmt: skip
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=one.timeout))
        dist.barrier()  # wait until all ranks are there
        if rank == one.culprit:
            trigger.install()
            if one.fault.startswith("late"):
                board.value = time.monotonic()
                time.sleep(one.delay if one.fault == "late for a moment" else TIMEOUT + _LATE)
        program.run()
    except BaseException as raised:
        told = time.monotonic()
        error = f"{type(raised).__name__}: {raised}"
    left_behind = tuple(_left_behind(before, one.timeout + 2))
    return Answer(False, error, program.call, told, tuple(program.refusals), left_behind)


def resources() -> dict[str, int]:
    """Count resources that a rank may leave behind: threads, connections, shared memory."""
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the descriptor of the list itself is closed
            continue
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "threads of Python": threading.active_count(),
        "sockets": sum(name.startswith("socket:") for name in names),
        "files in memory": sum("memfd:" in name or "/dev/shm" in name for name in names),
        "mapped files in memory": maps.count("memfd:cpattn") + maps.count("/dev/shm"),
        "processes": sum("pidfd" in name for name in names),
    }


def _left_behind(before: dict[str, int], patience: float) -> list[str]:
    """List resources that are left when the group is gone and were not there before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    deadline = time.monotonic() + patience
    while True:
        gc.collect()
        after = resources()
        more = [f"{after[name] - n} {name}" for name, n in before.items() if after[name] > n]
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.02)


def warm_up() -> None:
    """Make objects that ranks need, besides modules, once before the fork."""
    torch.set_num_threads(1)
    for case in (*CASES, AHEAD):
        expected_of(case)
    expected_of_step()
