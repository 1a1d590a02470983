# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group that end early or are interrupted, and what the others are told."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import ring
from support.distributed.disagreements import SMALL
from support.distributed.distributed_worker import error_of
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


def run_interrupt(rank: int) -> float:
    """Return how long Ctrl-C takes to end a wait for rank 1, which does not come."""
    if rank == 1:
        return 0.0
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    plan = cp.plan([8], block_tables=[[0, 1]])
    return seconds_to_interrupt(lambda: cp.gather(plan, torch.zeros(4, 1)))


def run_early_end(rank: int) -> str:
    """Return what ranks are told of rank 0, which ends while rank 3 still waits for rank 2's keys.

    They pass keys round, and rank 2 computes longer than anybody waits for one that has died.
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
