# SPDX-License-Identifier: Apache-2.0
"""What ranks of tests run that are, or seem to be, on several hosts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.distributed import ContextParallel
from cpattn.distributed.transport import host
from support.distributed import distributed_worker as worker
from support.distributed.prefill_batches import Case, make_batch
from support.distributed.shared_pool_worker import LAYER, make_pool


def run_topology(rank: int, folder: Path, apart: str) -> dict:
    """What ranks find if the last says that it is somewhere else."""
    patches = contextlib.ExitStack()
    if rank == dist.get_world_size() - 1:
        if apart == "host":
            other = folder / "boot_id"
            other.write_text("00000000-0000-0000-0000-000000000001\n")
            patches.enter_context(mock.patch.object(host, "_BOOT_ID", other))
        elif apart == "namespace":
            patches.enter_context(mock.patch.object(host, "_PID_NAMESPACE", folder))
        elif apart == "files":
            refused = PermissionError(13, "Permission denied")
            patches.enter_context(mock.patch.object(host, "_opened", side_effect=refused))
        elif apart == "blind":
            real = _core.HostBarrier.meet
            blind = lambda *arguments: [[0] for _ in real(*arguments)]  # noqa: E731
            patches.enter_context(mock.patch.object(_core.HostBarrier, "meet", blind))
    case = Case("topology", extend_lens=(5, 13), prefix_lens=(4, 0))
    transport = "tcp" if apart == "asked" else "auto"
    with patches:
        cp = ContextParallel(dist.group.WORLD, page_size=case.page_size, transport=transport)
        topology = cp.topology()
        insisting = "no error"
        try:
            if apart != "asked":
                ContextParallel(dist.group.WORLD, page_size=4, transport="shm")
        except RuntimeError as error:
            insisting = str(error)
    batch = make_batch(case)
    pool, plan = make_pool(cp, case, batch), worker.make_plan(cp, case, batch)
    rows = torch.ones(plan.num_local_rows, 2, 32)
    if cp.shared_memory() is None:  # then every rank has a pool of its own
        pool.get_key_buffer(LAYER).zero_()
    cp.write_kv(plan, rows, rows, *pool.get_kv_buffer(LAYER))
    written = pool.get_key_buffer(LAYER).flatten(0, 1)[torch.tensor(plan.slots)]
    return {
        "topology": topology,
        "insisting": insisting,
        "shared": cp.shared_memory() is not None,
        "written": bool((written == 1).all()),
    }
