# SPDX-License-Identifier: Apache-2.0
"""What the ranks of two hosts run of which one is lost, and what they are told."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import rounds
from cpattn.distributed.transport import exchange, shared_memory
from cpattn.kv import PageInterleave
from support.distributed import distributed_worker as worker
from support.distributed import shared_pool_worker as pools
from support.distributed.hosts.layouts import Layout, on_hosts


def group_of(layout: Layout, rank: int) -> pools.Group:
    with on_hosts(layout, rank):
        return pools.Group()


def run_loss(
    rank: int, layout: Layout, lost: int, when: str, clock: Path
) -> tuple[str, float] | None:
    """What each rank is told, and when, of which one is killed or stopped."""
    group = group_of(layout, rank)
    group.write()
    attempt = group.write
    if when in ATTENDING:
        attempt = lambda: ATTENDING[when](group, killer if rank == lost else None)  # noqa: E731
    if rank == lost:
        time.sleep(0.3)  # the others wait by now
        killer = pools.Killer(clock)
        if when == "before it":
            killer.kill()
        elif when == "as it writes":
            group.plan.__dict__["own_slots"] = killer
        elif when == "as rows of others arrive":  # with what it sends on its way
            exchange.RowExchange.arrived = lambda *_: killer.kill()  # type: ignore[method-assign]
        elif when == "stopped":
            threading.Thread(target=_go_on_later, args=(os.getpid(), 4.0)).start()
            os.kill(os.getpid(), signal.SIGSTOP)
    message, _ = worker._error_of(attempt)
    if (
        message == "no error" and rank // 2 != lost // 2
    ):  # its rows had come: the next call misses it
        message, _ = worker._error_of(attempt)
    return message, time.monotonic()


def run_stopped_behind_a_late_one(rank: int, layout: Layout) -> str:
    """What ranks are told of rank 3, which is stopped, where rank 2 comes late to await it."""
    group = group_of(layout, rank)
    group.write()
    if rank == 2:
        time.sleep(1.0)
    if rank == 3:
        threading.Thread(target=_go_on_later, args=(os.getpid(), 6.0)).start()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGSTOP)
    return worker._error_of(group.write)[0]


def _go_on_later(pid: int, seconds: float) -> None:
    """By another process: a stopped one has no threads that run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later interpreters warn of threads
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)


def _attend_in_rounds(group: pools.Group, killer: pools.Killer | None) -> None:
    """Attention that writes, one KV head after the other; the killer comes behind the first."""
    rows = torch.ones(group.plan.num_local_rows, 2, 32)
    queries = torch.ones(group.plan.num_local_rows, 4, 32)
    with _killed_at_meeting(2, killer):
        group.cp.attend(group.plan, queries, group.k, group.v, k_local=rows, v_local=rows)


def _attend_in_a_ring(group: pools.Group, killer: pools.Killer | None) -> None:
    """A ring between hosts; the killer comes before its second step, with the first head here."""
    page_size = group.case.page_size
    placement = PageInterleave(shard_size=dist.get_world_size(), page_size=page_size)
    cp = ContextParallel(
        dist.group.WORLD, page_size=page_size, placement=placement, exchange="ring"
    )
    plan = worker.make_plan(cp, group.case, group.batch)
    shards = [torch.ones(16 * page_size, 2, 32) for _ in "kv"]
    with _killed_at_meeting(3, killer):
        cp.attend(plan, torch.ones(plan.num_local_rows, 4, 32), *shards)


ATTENDING = {"between rounds": _attend_in_rounds, "in a ring": _attend_in_a_ring}


@contextlib.contextmanager
def _killed_at_meeting(number: int, killer: pools.Killer | None) -> Iterator[None]:
    """Heads go one after the other; behind each, the ranks of a host meet."""
    meet = exchange.RowExchange.meet_host
    meetings = 0

    def counted(self, call, terms=()):
        nonlocal meetings
        meetings += not terms
        if killer is not None and meetings == number:
            killer.kill()
        return meet(self, call, terms)

    one_head = mock.patch.multiple(rounds, _LEAST_BYTES=1, _MOST_FLOPS_PER_BYTE=1 << 60)
    with one_head, mock.patch.object(exchange.RowExchange, "meet_host", counted):
        yield


def run_interrupt(rank: int, layout: Layout) -> tuple[str, float]:
    """Ctrl-C on rank 0, which waits for rank 1; what the others are told, who come and wait."""
    group = group_of(layout, rank)
    delay = 0.5
    if rank == 1:
        time.sleep(2 * delay)
    if rank == 0:
        start = time.monotonic()
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            group.write()
        except KeyboardInterrupt:
            return "KeyboardInterrupt", time.monotonic() - start - delay
    return worker._error_of(group.write)


def run_without_memory(rank: int, layout: Layout) -> dict[str, str]:
    with on_hosts(layout, rank):
        cp = ContextParallel(dist.group.WORLD, page_size=4)
        told = partial(pools.told_of_a_pool, cp.shared_memory())
    nothing = contextlib.nullcontext()
    answers = {}
    none_left = mock.patch.object(shared_memory, "available_bytes", return_value=0)
    with none_left if rank >= 2 else nothing:
        answers["one host has none"] = told(1 << 16)
    with pools.small_files() if rank == 1 else nothing:
        answers["no file of that size"] = told(1 << 16)
    sealed = shared_memory.sealed_file
    short = mock.patch.object(
        shared_memory, "sealed_file", lambda name, num_bytes: sealed(name, num_bytes // 4)
    )
    with short if rank == 3 else nothing:
        answers["a short part"] = told(1 << 16)
    answers["at last"] = told(1 << 16)
    answers["files"] = str([name for name in pools.open_files() if "memfd" in name])
    return answers


def run_fork(rank: int, layout: Layout) -> str:
    """What a forked child of rank 3 is told; the group goes on without it."""
    group = group_of(layout, rank)
    message = pools.answer_of_a_child(group.told) if rank == 3 else ""
    group.write(7.0)
    slots = torch.tensor(group.plan.slots)
    assert (group.k.flatten(0, 1)[slots] == 7).all()
    dist.barrier()
    return message


def run_killed_with_pools(rank: int, layout: Layout, folder: Path) -> None:
    """All ranks write down how much memory is shared, and end without a word."""
    with on_hosts(layout, rank):
        pools.run_killed_with_a_pool(rank, folder)
