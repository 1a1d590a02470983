# SPDX-License-Identifier: Apache-2.0
"""Ranks in separate processes, and the functions that start them."""

import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel, ContextParallelPlan
from support.distributed.prefill_batches import Batch, Case
from support.time_limits import PATIENCE


def forking(preload: str = __name__) -> Any:
    """Return a multiprocessing context whose processes fork from a server with `preload`.

    Otherwise each process imports torch for seconds. A running server stays as it is. The server
    opens no wheel: processes that fork from it would share one file and its position.
    """
    assert find_spec(preload), preload  # the server ignores missing modules
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    folders = [path for path in sys.path if not path.endswith((".whl", ".zip"))]
    said = {"PYTHONPATH": os.pathsep.join(folders), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with mock.patch.dict(os.environ, said), mock.patch.object(sys, "path", folders):
        forkserver.ensure_running()
    return context


def run_world(
    size: int, path: Path, program, *arguments, group_timeout=PATIENCE, preload=__name__
) -> list:
    """Return the result of program(rank, *arguments) on every rank; None if the rank died.

    Ranks live until all have answered: a rank that ended early would cause another error. If a
    rank fails, its error is raised at once, and the others, which may wait for it, are ended.
    """
    context = forking(preload)
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        ends = (rank, size, path / "store", group_timeout, theirs)
        process = context.Process(target=_rank, args=(*ends, program, *arguments), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _answers([ours for _, ours in ranks])
    except BaseException:
        for process, _ in ranks:
            process.kill()
        raise
    finally:
        # Closing pipes ends the waits of ranks; setting an event would wait for killed ranks.
        for _, ours in ranks:
            ours.close()
        for process, _ in ranks:
            process.join(PATIENCE)
            process.kill()


def _answers(receivers: list[connection.Connection]) -> list:
    """Return the answer of each rank; raise the first error."""
    answers: dict[connection.Connection, object] = {}
    deadline = time.monotonic() + PATIENCE
    while len(answers) < len(receivers):
        missing = [receiver for receiver in receivers if receiver not in answers]
        ready = connection.wait(missing, max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {[receivers.index(one) for one in missing]} does not answer"
        for receiver in ready:
            answers[receiver] = _answer(receiver)
    return [answers[receiver] for receiver in receivers]


def _answer(receiver):
    try:
        answer = pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _rank(rank, size, store, timeout, asker, program, *arguments):
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        answer = program(rank, *arguments)
    except BaseException:
        answer = AssertionError(f"rank {rank} of {size}:\n{traceback.format_exc()}")
    # `send` would put tensors into /dev/shm, and a container may have little of it.
    asker.send_bytes(pickle.dumps(answer))
    asker.poll(PATIENCE)  # wait until all have answered


def make_plan(cp: ContextParallel, case: Case, batch: Batch, **changes) -> ContextParallelPlan:
    arguments = {
        "extend_lens": case.extend_lens,
        "seq_lens": case.seq_lens,
        "block_tables": batch.block_tables,
        "num_tokens": case.num_tokens,
        "pad_to_physical": case.pad_to_physical,
    }
    return cp.plan(**(arguments | changes))


def error_of(attempt) -> tuple[str, float]:
    """Return the error of a call, and its seconds until then."""
    start = time.monotonic()
    try:
        attempt()
    except (MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", 0.0
