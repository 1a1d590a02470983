# SPDX-License-Identifier: Apache-2.0
"""Ranks on hosts: a rank is lost, stopped or interrupted, or a host has no memory."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import ring
from cpattn.distributed.transport import shared_memory
from cpattn.kv import MHATokenToKVPool
from support.distributed import shared_pool_worker as pools
from support.distributed.disagreements import SMALL
from support.distributed.distributed_worker import error_of
from support.distributed.fault_worlds import resources
from support.distributed.hosts.layouts import Layout, on_hosts
from support.distributed.sharded_worker import traffic_rank


def seconds_to_interrupt(call: Callable[[], Any]) -> float:
    delay = 0.2
    start = time.monotonic()
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - start - delay
    raise AssertionError("not interrupted")


def run_interrupt_of_gather(rank: int) -> float:
    """Return how long Ctrl-C takes to end a wait for rank 1, which never calls."""
    if rank == 1:
        return 0.0
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    plan = cp.plan([8], block_tables=[[0, 1]])
    return seconds_to_interrupt(lambda: cp.gather(plan, torch.zeros(4, 1)))


def run_early_end(rank: int) -> str:
    """Return errors of ranks if rank 0 ends while rank 3 still waits for rank 2's keys.

    Ranks pass keys round, and rank 2 computes longer than a rank waits for a dead one.
    """
    cp, plan, (q, *_), shards = traffic_rank(rank, SMALL, "ring")
    assert cp.topology().transport == "shm"
    attend_part = ring.attend_part

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.0 if rank == 2 else 0)
        return attend_part(*arguments, **options)

    with mock.patch.object(ring, "attend_part", slowly):
        message, _ = error_of(lambda: cp.attend(plan, q, *shards))
    if rank == 0 and message == "no error":
        os._exit(0)
    return message


def group_of(layout: Layout, rank: int) -> pools.Group:
    with on_hosts(layout, rank):
        return pools.Group()


def run_stopped_behind_a_late_one(rank: int, layout: Layout) -> str:
    """Return errors of ranks if rank 3 is stopped and rank 2 waits for it late."""
    group = group_of(layout, rank)
    group.write()
    if rank == 2:
        time.sleep(1.0)
    if rank == 3:
        time.sleep(0.3)
        with subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    return group.told()


def run_interrupt(rank: int, layout: Layout) -> tuple[str, float]:
    """Send Ctrl-C to rank 0, which waits for rank 1; return the errors of the other ranks."""
    group = group_of(layout, rank)
    if rank == 0:
        return "KeyboardInterrupt", seconds_to_interrupt(group.write)
    if rank == 1:
        time.sleep(1.0)
    return error_of(group.write)


def run_without_memory(rank: int, layout: Layout) -> dict[str, Any]:
    """Return errors of ranks about pools that some cannot make; the last host may lack memory."""
    with on_hosts(layout, rank):
        cp = ContextParallel(dist.group.WORLD, page_size=4)
        told = partial(pools.told_of_a_pool, cp.shared_memory())
    before = resources()
    sealed = shared_memory.sealed_file

    def short(name: str, num_bytes: int) -> int:
        return sealed(name, num_bytes // 4)

    def with_patch(affected: bool, context: contextlib.AbstractContextManager) -> str:
        with context if affected else contextlib.nullcontext():
            return told(1 << 16)

    patched = partial(mock.patch.object, shared_memory)
    broken = mock.patch.object(_core, "map_shared_memory", side_effect=MemoryError("full"))
    return {
        "beyond the host": told(1 << 40),
        "one host has none": with_patch(
            rank in layout[-1], patched("available_bytes", return_value=0)
        ),
        "no file of that size": with_patch(rank == 1, pools.small_files()),
        "a short part": with_patch(
            rank == dist.get_world_size() - 1, patched("sealed_file", short)
        ),
        "cannot map": with_patch(rank == 1, broken),
        "other sizes": told(64 if rank == 1 else 128),
        "at last": told(1 << 16),
        "left behind": [x for x, n in resources().items() if "memory" in x and n > before[x]],
    }


def run_fork(rank: int, layout: Layout) -> str:
    group = group_of(layout, rank)

    def told_and_gone() -> str:
        nonlocal group
        said = group.told()
        del group
        return said

    last = rank == dist.get_world_size() - 1
    message = pools.answer_of_a_child(told_and_gone) if last else ""
    group.write(7.0)
    assert group.written() == [7.0]
    dist.barrier()
    return message


CALLS = 20


def run_two_groups_and_a_loss(rank: int, folder: Path) -> tuple[str, float, str]:
    """Return errors of ranks in two groups that write at once when rank 1 is killed, and errors of
    their next call. The second group goes on until rank 0 has been told."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = rank // 2
    cp = ContextParallel(groups[number], page_size=4, transport="shm")
    pool = MHATokenToKVPool(
        size=16, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, memory=cp.shared_memory()
    )
    plan, (k, v) = cp.plan([11], block_tables=[[1, 2, 3]]), pool.get_kv_buffer(0)

    def write(i: int) -> None:
        value = 10.0 * number + i % 7
        rows = torch.full((plan.num_local_rows, 1, 8), value).bfloat16()
        cp.write_kv(plan, rows, rows, k, v)
        assert k.flatten(0, 1)[torch.tensor(plan.slots)].unique().tolist() == [value]
        cp.gather(plan, rows)  # gloo; no rank writes again before all have looked

    i, is_told = 0, torch.zeros(1)
    while not is_told:
        if rank == 1 and i == CALLS:
            os.kill(os.getpid(), signal.SIGKILL)
        told, seconds = error_of(partial(write, i))
        if told != "no error":
            (folder / "told").touch()
            return told, seconds, error_of(partial(write, i))[0]
        if number == 1:
            is_told.fill_((folder / "told").exists())
            dist.broadcast(is_told, 2, groups[1])
        i += 1
    return error_of(partial(write, i))[0], 0.0, ""
