# SPDX-License-Identifier: Apache-2.0
"""Pools that the ranks of a host share, and calls that write to them."""

import contextlib
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.transport import host
from cpattn.distributed.transport.shared_memory import SharedMemory
from cpattn.kv import MHATokenToKVPool, MLATokenToKVPool
from support.distributed.disagreements import SMALL
from support.distributed.distributed_worker import error_of, make_plan
from support.distributed.prefill_batches import Batch, Case, make_batch

LAYERS, LAYER = 3, 1


def make_pool(cp: ContextParallel, case: Case, batch: Batch) -> MHATokenToKVPool:
    """Make a pool with the batch's caches in one layer, once for each host."""
    pool = MHATokenToKVPool(
        size=len(batch.k_cache) - case.page_size,
        page_size=case.page_size,
        num_layers=LAYERS,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        dtype=case.dtype,
        use_fia=False,
        memory=cp.shared_memory(),
    )
    if cp.cp_rank in {ranks[0] for ranks in cp.topology().ranks_of_host}:
        whole = batch.k_cache, batch.v_cache
        for cache, rows in zip(pool.get_kv_buffer(LAYER), whole, strict=True):
            cache.copy_(rows.view(cache.shape))
    dist.barrier()
    return pool


@contextlib.contextmanager
def counting_sends() -> Iterator[list[tuple[int, int]]]:
    """Record peers and bytes of this rank's sends."""
    sent: list[tuple[int, int]] = []

    def counting(block, rank, *arguments):
        sent.append((rank, block.numel()))
        return isend(block, rank, *arguments)

    isend = dist.isend
    with mock.patch.object(dist, "isend", counting):
        yield sent


def run_latents(rank: int) -> list[torch.Tensor]:
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    pool = MLATokenToKVPool(
        size=16, page_size=4, num_layers=2, kv_lora_rank=24, qk_rope_head_dim=8,
        memory=cp.shared_memory(),
    )  # fmt: skip
    plan = cp.plan([13], block_tables=[[3, 1, 4, 2]])
    latents = torch.arange(13 * 24).view(13, 1, 24).bfloat16()
    cp.write_kv(plan, cp.shard(plan, latents), None, pool.get_key_buffer(1), None)
    return [pool.get_key_buffer(1).flatten(0, 1)[torch.tensor(plan.slots)], latents]


class Group:
    def __init__(self) -> None:
        self.case, self.batch = SMALL, make_batch(SMALL)
        self.cp = ContextParallel(dist.group.WORLD, page_size=self.case.page_size)
        self.pool = make_pool(self.cp, self.case, self.batch)
        self.plan = make_plan(self.cp, self.case, self.batch)
        self.k, self.v = self.pool.get_kv_buffer(LAYER)

    def write(self, value: float = 1.0, **caches) -> None:
        rows = torch.full((self.plan.num_local_rows, 2, 32), value)
        self.cp.write_kv(self.plan, rows, rows, **({"k_cache": self.k, "v_cache": self.v} | caches))

    def told(self, **caches) -> str:
        return error_of(lambda: self.write(**caches))[0]

    def written(self) -> list[float]:
        """Return the values of keys of new tokens."""
        return self.k.flatten(0, 1)[torch.tensor(self.plan.slots)].unique().tolist()


def run_other_caches(rank: int) -> list[str]:
    group, odd = Group(), rank == 1
    other_k, other_v = group.pool.get_kv_buffer(2)
    told = [
        group.told(k_cache=other_k) if odd else group.told(),
        group.told(k_cache=group.k.clone(), v_cache=group.v.clone()) if odd else group.told(),
        group.told(v_cache=group.v.clone()) if odd else group.told(),
    ]
    group.write(k_cache=other_k, v_cache=other_v)  # the group stays usable
    return told


def run_slow_reader(rank: int) -> tuple[list[float], list[float]]:
    """Return what rank 1 reads between two writes, long after rank 0 entered the second."""
    group = Group()
    group.write(3.0)
    if rank == 1:
        time.sleep(0.3)
    before = group.written() if rank == 1 else [3.0]
    group.write(5.0)
    return before, group.written()


def run_hidden(rank: int) -> tuple[str, str]:
    """Hide from rank 1 the boot id of its system; return the errors of ranks, and the transport."""
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    hidden = Path("/nonexistent") if rank == 1 else host._BOOT_ID
    with mock.patch.object(host, "_BOOT_ID", hidden):
        told, _ = error_of(cp.topology)
    return told, cp.topology().transport


def answer_of_a_child(call: Callable[[], str]) -> str:
    """Return the answer of a call in a forked child of this process, which then ends."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later interpreters warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, call().encode())
        finally:
            os._exit(0)
    os.close(writer)
    message = os.read(reader, 1000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    return message


def told_of_a_pool(memory: SharedMemory | None, size: int) -> str:
    """Return the error of a rank that makes a pool of `size` slots."""
    sizes = {"size": size, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64}
    return error_of(lambda: MHATokenToKVPool(**sizes, memory=memory))[0]


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Limit files of this process to a megabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
