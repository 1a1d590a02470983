# SPDX-License-Identifier: Apache-2.0
"""Two groups of ranks on one host, of which one loses a rank."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.kv import MHATokenToKVPool

CALLS = 300


def run_two_groups_and_a_loss(rank: int) -> tuple[str, float]:
    """What ranks 0, 1 and 2, 3 are told that write and exchange at once, when rank 1 is killed."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = rank // 2
    cp = ContextParallel(groups[number], page_size=4, transport="shm")
    pool = MHATokenToKVPool(
        size=16, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, memory=cp.shared_memory()
    )
    plan, (k, v) = cp.plan([11], block_tables=[[1, 2, 3]]), pool.get_kv_buffer(0)
    told, since = "no error", time.monotonic()
    try:
        for i in range(CALLS):
            if rank == 1 and i == CALLS // 3:
                os.kill(os.getpid(), signal.SIGKILL)
            value = 10.0 * number + i % 7
            since = time.monotonic()
            rows = torch.full((plan.num_local_rows, 1, 8), value).bfloat16()
            cp.write_kv(plan, rows, rows, k, v)
            assert k.flatten(0, 1)[torch.tensor(plan.slots)].unique().tolist() == [value]
            cp.gather(plan, rows)  # over gloo; and nobody writes before all have looked
    except RuntimeError as error:
        return f"RuntimeError: {error}", time.monotonic() - since
    return told, 0.0
