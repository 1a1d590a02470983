# SPDX-License-Identifier: Apache-2.0
"""A rank on a host of its own: `python -m support.distributed.hosts.program`, with what torch's
rendezvous takes from the environment. Its last line is JSON."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.kv import MHATokenToKVPool
from support.time_limits import PATIENCE

TOKENS, PAGE_SIZE, KV_HEADS, HEAD_DIM = 8192, 128, 2, 128
ROW_BYTES = 2 * 2 * KV_HEADS * HEAD_DIM  # keys and values in bfloat16


def received_bytes() -> int:
    """Of the cable of this host, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            return int(counters.split()[0])
    raise AssertionError("no cable")


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    cp = ContextParallel(dist.group.WORLD, page_size=PAGE_SIZE)
    pool = MHATokenToKVPool(
        size=TOKENS, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        memory=cp.shared_memory(), use_fia=False,
    )  # fmt: skip
    shared = pool.get_kv_buffer(0)
    private = [torch.zeros_like(cache) for cache in shared]
    pages = torch.randperm(TOKENS // PAGE_SIZE, generator=torch.Generator().manual_seed(1)) + 1
    plan = cp.plan([TOKENS], block_tables=pages[None])
    whole = torch.randn(2, TOKENS, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    k, v = (cp.shard(plan, x) for x in whole.bfloat16())
    arrived = []
    for caches in (shared, private):
        dist.barrier()
        before = received_bytes()
        dist.barrier()  # before any rank of this host receives
        cp.write_kv(plan, k, v, *caches)
        dist.barrier()
        arrived.append(received_bytes() - before)
    same = [bool(torch.equal(x, y)) for x, y in zip(shared, private, strict=True)]
    answer = {
        "topology": repr(cp.topology()),
        "ranks of host": cp.topology().ranks_of_host,
        "arrived": arrived,
        "same": same,
        "written": bool((private[0][1:].abs().sum((1, 2, 3)) > 0).all()),
    }
    dist.barrier()  # until all have looked
    os.write(1, f"{json.dumps(answer)}\n".encode())  # whole, beside what another rank writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
