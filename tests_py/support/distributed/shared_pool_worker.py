# SPDX-License-Identifier: Apache-2.0
"""What the ranks of tests on shared pools run."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.distributed import ContextParallel
from cpattn.distributed.transport import host
from cpattn.distributed.transport.shared_memory import SharedMemory
from cpattn.kv import MHATokenToKVPool, MLATokenToKVPool
from support.distributed import distributed_worker as worker
from support.distributed.prefill_batches import Batch, Case, make_batch

LAYERS, LAYER = 3, 1


def make_pool(cp: ContextParallel, case: Case, batch: Batch) -> MHATokenToKVPool:
    """Of as many slots as the caches of the batch, with these in one layer, on each host."""
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
        for cache, rows in zip(pool.get_kv_buffer(LAYER), (batch.k_cache, batch.v_cache)):  # noqa: B905
            cache.copy_(rows.view(cache.shape))
    dist.barrier()
    return pool


@contextlib.contextmanager
def counting_sends() -> Iterator[list[tuple[int, int]]]:
    """Whom this rank sends to, and how many bytes."""
    sent: list[tuple[int, int]] = []

    def counting(block, rank, *arguments):
        sent.append((rank, block.numel()))
        return isend(block, rank, *arguments)

    isend = dist.isend
    with mock.patch.object(dist, "isend", counting):
        yield sent


def run_case(case: Case) -> dict:
    """One batch, written to a shared pool and, over tcp, to caches of this rank."""
    batch = make_batch(case)
    options = {"strategy": case.strategy, "page_size": case.page_size}
    tcp = ContextParallel(dist.group.WORLD, transport="tcp", **options)
    shm = ContextParallel(dist.group.WORLD, **options)
    plan = worker.make_plan(shm, case, batch)
    changes = {}
    if case.num_tokens is not None:  # padding tokens write somewhere, all to one slot
        changes["out_cache_loc"] = plan.slots.copy()
        changes["out_cache_loc"][sum(case.extend_lens) :] = len(batch.k_cache) - 1
        plan = worker.make_plan(shm, case, batch, **changes)
    pool = make_pool(shm, case, batch)
    q, k, v = (
        shm.shard(plan, x) for x in (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    )
    k_cache, v_cache = pool.get_kv_buffer(LAYER)
    with counting_sends() as sent:
        shm.write_kv(plan, k, v, k_cache, v_cache)
    tcp.write_kv(worker.make_plan(tcp, case, batch, **changes), k, v, batch.k_cache, batch.v_cache)
    out = shm.attend(plan, q, k_cache, v_cache)
    alone = tcp.attend(plan, q, batch.k_cache, batch.v_cache)
    answer = {
        "sent": [num_bytes for _, num_bytes in sent],
        "slots": [slot for slot in plan.own_slots.tolist() if slot >= 0],
        "all_slots": plan.slots.tolist(),
        "caches": [bits(k_cache), bits(v_cache)],
        "over tcp": [
            bits(batch.k_cache).view((*k_cache.shape[:2], -1)),
            bits(batch.v_cache).view((*v_cache.shape[:2], -1)),
        ],
        "out": [bits(out), bits(alone)],
        "elsewhere": max(int(pool.get_key_buffer(i).count_nonzero()) for i in (0, 2)),
    }
    dist.barrier()  # until all have looked
    return answer


def bits(x: torch.Tensor) -> torch.Tensor:
    """A copy as bytes, [.., bytes of the last dimensions]; NaN are equal there."""
    flat = x.contiguous().view(torch.uint8)
    return flat.flatten(2).clone() if x.ndim == 4 else flat.clone()


def run_cases(rank: int, cases: list[Case]) -> list[dict]:
    return [run_case(case) for case in cases]


def run_latents(rank: int) -> list[torch.Tensor]:
    """Latents alone, in a pool of MLA."""
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    pool = MLATokenToKVPool(
        size=16, page_size=4, num_layers=2, kv_lora_rank=24, qk_rope_head_dim=8,
        memory=cp.shared_memory(),
    )  # fmt: skip
    plan = cp.plan([13], block_tables=[[3, 1, 4, 2]])
    latents = torch.arange(13 * 24).view(13, 1, 24).bfloat16()
    cp.write_kv(plan, cp.shard(plan, latents), None, pool.get_key_buffer(1), None)
    return [pool.get_key_buffer(1).flatten(0, 1)[torch.tensor(plan.slots)], latents]


def run_disagreements(rank: int) -> tuple[dict, dict]:
    """What ranks are told over gloo, and then the same through shared memory."""
    over_gloo, _ = worker.run_disagreements(rank)
    assert ContextParallel(dist.group.WORLD, page_size=1).shared_memory() is not None
    with counting_sends() as sent:
        through_memory, _ = worker.run_disagreements(rank)
    assert max(num_bytes for _, num_bytes in sent) > 100  # rows alone, and no digests
    return over_gloo, through_memory


class Group:
    """A small pool of all ranks, and a call that writes to it."""

    def __init__(self) -> None:
        self.case = Case("faults", extend_lens=(5, 13), prefix_lens=(4, 0))
        self.batch = make_batch(self.case)
        self.cp = ContextParallel(dist.group.WORLD, page_size=self.case.page_size)
        self.pool = make_pool(self.cp, self.case, self.batch)
        self.plan = worker.make_plan(self.cp, self.case, self.batch)
        self.k, self.v = self.pool.get_kv_buffer(LAYER)

    def write(self, value: float = 1.0, **caches) -> None:
        rows = torch.full((self.plan.num_local_rows, 2, 32), value)
        self.cp.write_kv(self.plan, rows, rows, **({"k_cache": self.k, "v_cache": self.v} | caches))

    def told(self, **caches) -> str:
        return worker._error_of(lambda: self.write(**caches))[0]


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


def run_loss(rank: int, how: str, clock: Path) -> tuple[str, float] | str:
    """What the others are told, and when, about the last rank."""
    group = Group()
    group.write()
    if rank == 2:
        time.sleep(0.3)  # the others wait by now
        if how == "killed as it writes":
            group.plan.__dict__["own_slots"] = Killer(clock)
        elif how == "killed":
            Killer(clock).kill()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
            return group.told()
    pids = group.cp._host().pids
    told = group.told(), time.monotonic()
    if how == "stopped" and rank == 0:
        time.sleep(1)  # until the other has been told, too
        os.kill(pids[2], signal.SIGCONT)
    assert "cannot be used any more" in group.told()
    return told


class Killer:
    """Slots that end this process when they are read, and write down when."""

    def __init__(self, clock: Path) -> None:
        self.clock = clock

    def kill(self) -> None:
        self.clock.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def __len__(self):
        self.kill()

    __array__ = __dlpack__ = __iter__ = __getitem__ = __len__


def run_hidden(rank: int) -> tuple[str, str]:
    """What ranks are told of rank 1, whose system does not show what it boots as; and at last."""
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    hidden = Path("/nonexistent") if rank == 1 else host._BOOT_ID
    told = "no error"
    with mock.patch.object(host, "_BOOT_ID", hidden):
        try:
            cp.topology()
        except (OSError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
    return told, cp.topology().transport


def run_interrupt(rank: int) -> tuple[float, str]:
    """How long Ctrl-C takes to end a wait for rank 1, and what rank 1 is told that comes late."""
    group, seconds, delay = Group(), 0.0, 0.2
    if rank == 0:
        start = time.monotonic()
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        with contextlib.suppress(KeyboardInterrupt):
            group.write()
            raise AssertionError("not interrupted")
        seconds = time.monotonic() - start - delay
        dist.barrier()
        return seconds, ""
    dist.barrier()
    first = group.told()  # rank 0 had come, so this agrees, and it is missing at the end
    return seconds, first


def answer_of_a_child(call: Callable[[], str]) -> str:
    """What a call says in a forked child of this process, which ends with it."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later interpreters warn of threads
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


def run_fork(rank: int) -> tuple[str, bool]:
    """What a forked child of rank 1 is told, and whether the ranks go on without it."""
    group = Group()

    def told_and_gone() -> str:
        nonlocal group
        said = group.told()
        del group
        return said

    message = answer_of_a_child(told_and_gone) if rank == 1 else ""
    group.write(7.0)
    slots = torch.tensor(group.plan.slots)
    return message, bool((group.k.flatten(0, 1)[slots] == 7).all())


def told_of_a_pool(memory: SharedMemory | None, size: int) -> str:
    """What a rank is told that makes a pool of so many slots."""
    try:
        MHATokenToKVPool(
            size=size, page_size=4, num_layers=1, num_kv_heads=1, head_dim=64, memory=memory
        )
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Files of this process are of a megabyte at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_without_memory(rank: int) -> dict[str, str]:
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    told = partial(told_of_a_pool, cp.shared_memory())
    answers = {"beyond the host": told(1 << 40)}
    with small_files() if rank == 1 else contextlib.nullcontext():
        answers["no file of that size"] = told(1 << 16)
    broken = mock.patch.object(_core, "map_shared_memory", side_effect=MemoryError("full"))
    with broken if rank == 1 else contextlib.nullcontext():
        answers["cannot map"] = told(1 << 16)
    answers["other sizes"] = told(64 if rank == 1 else 128)
    answers["at last"] = told(1 << 16)
    answers["maps"] = str("memfd:cpattn pool" in Path("/proc/self/maps").read_text())
    answers["files"] = str([name for name in open_files() if "memfd" in name])
    return answers


POOL_BYTES = 256 << 20


def run_killed_with_a_pool(rank: int, folder: Path) -> None:
    """All ranks write down how much memory is shared on the host, and end without a word."""
    cp = ContextParallel(dist.group.WORLD, page_size=128)
    pool = MHATokenToKVPool(
        size=POOL_BYTES // 4096 - 128, page_size=128, num_layers=1, num_kv_heads=8, head_dim=128,
        memory=cp.shared_memory(),
    )  # fmt: skip
    assert pool.nbytes == POOL_BYTES
    names = [name for name in Path("/proc/self/maps").read_text().splitlines() if "memfd" in name]
    assert all(name.endswith("(deleted)") for name in names)
    (folder / str(rank)).write_text(str(shared_bytes()))
    with contextlib.suppress(RuntimeError):  # others may be gone before this one knows it
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def shared_bytes() -> int:
    """Of all files in memory on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Shmem in /proc/meminfo")


def open_files() -> list[str]:
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(entry))
    return names


def run_two_groups(rank: int) -> list[float]:
    """Ranks 0, 1 and 2, 3 write to pools of their own, at once and at their own pace."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cp = ContextParallel(groups[rank // 2], page_size=4, transport="shm")
    pool = MHATokenToKVPool(
        size=16, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, memory=cp.shared_memory()
    )
    plan, (k, v) = cp.plan([11], block_tables=[[1, 2, 3]]), pool.get_kv_buffer(0)
    for i in range(200):
        if i % 50 == rank:
            time.sleep(0.005)
        rows = torch.full((plan.num_local_rows, 1, 8), 10.0 * (rank // 2) + i % 7).bfloat16()
        cp.write_kv(plan, rows, rows, k, v)
    return k.flatten(0, 1)[torch.tensor(plan.slots), 0, 0].tolist()


def run_slow_reader(rank: int) -> tuple[list[float], list[float]]:
    """What rank 1 reads between two writes, while rank 0 has long entered the second."""
    group = Group()
    group.write(3.0)
    if rank == 1:
        time.sleep(0.3)
    slots = torch.tensor(group.plan.slots)
    before = group.k.flatten(0, 1)[slots].unique().tolist() if rank == 1 else [3.0]
    group.write(5.0)
    return before, group.k.flatten(0, 1)[slots].unique().tolist()
