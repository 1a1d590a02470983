# SPDX-License-Identifier: Apache-2.0
"""The ranks of the distributed tests: what each of them runs, and how they are started."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel, ContextParallelPlan
from support.distributed.prefill_batches import Batch, Case, make_batch
from support.time_limits import PATIENCE


def run_world(
    size: int, path: Path, program, *arguments, group_timeout=PATIENCE, preload=__name__
) -> list:
    """What program(rank, *arguments) returns on every rank; None for a rank that died.

    Ranks are forked from a server that has imported torch (or the module `preload`, where no
    server runs yet), and live until all have answered: a rank that ended early would be an error
    of its own. Where one fails, that is raised at once, and the others end, which may wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
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
        # What they wait for: no event, which waits for those that wait for it, killed or not.
        for _, ours in ranks:
            ours.close()
        for process, _ in ranks:
            process.join(PATIENCE)
            process.kill()


def _answers(receivers: list[connection.Connection]) -> list:
    """Of each rank, as they come; the first that is an error is raised."""
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
    # Not `send`, by which tensors take room in /dev/shm, of which a container may have little.
    asker.send_bytes(pickle.dumps(answer))
    asker.poll(PATIENCE)  # until all have answered


def make_plan(cp: ContextParallel, case: Case, batch: Batch, **changes) -> ContextParallelPlan:
    arguments = {
        "extend_lens": case.extend_lens,
        "seq_lens": case.seq_lens,
        "block_tables": batch.block_tables,
        "num_tokens": case.num_tokens,
        "pad_to_physical": case.pad_to_physical,
    }
    return cp.plan(**(arguments | changes))


def run_case(group: dist.ProcessGroup, case: Case) -> dict:
    """One layer, as an engine runs it; what came out on this rank."""
    batch = make_batch(case)
    cp = ContextParallel(group, strategy=case.strategy, page_size=case.page_size)
    plan = make_plan(cp, case, batch)
    q, k, v = (
        cp.shard(plan, x) for x in (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    )
    for x in (q, k, v):  # rows of physical padding hold anything
        x[plan.num_local_rows :] = torch.nan
    cp.write_kv(plan, k, v, batch.k_cache, batch.v_cache)
    out, lse = cp.attend(plan, q, batch.k_cache, batch.v_cache, return_lse=True)
    positions = torch.arange(plan.num_tokens)
    assert torch.equal(cp.gather(plan, cp.shard(plan, positions)), positions)
    return {
        "rows_per_rank": plan.rows_per_rank,
        "num_rows": len(q),
        "pad_out": out[plan.num_local_rows :],
        "out": cp.gather(plan, out),
        "lse": cp.gather(plan, lse),
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
    }


def assert_last_dimension_returns(group: dist.ProcessGroup) -> None:
    """Positions are sharded along their last dimension, next to other dimensions."""
    cp = ContextParallel(group, page_size=1)
    plan = cp.plan([7, 3], block_tables=torch.arange(14).view(2, 7))
    positions = torch.arange(10).repeat(2, 3, 1)
    gathered = cp.gather(plan, cp.shard(plan, positions, -1), -1)
    assert torch.equal(gathered, positions)
    assert gathered.is_contiguous()


def run_cases(rank: int, cases: list[Case]) -> dict[str, dict]:
    assert_last_dimension_returns(dist.group.WORLD)
    return {case.name: run_case(dist.group.WORLD, case) for case in cases}


def run_chunks(rank: int, case: Case, chunkings: list[list[int]]) -> list[torch.Tensor]:
    """For each chunking: the case, of one request, in as many steps."""
    return [_in_steps(case, chunks) for chunks in chunkings]


def _in_steps(case: Case, chunks: list[int]) -> torch.Tensor:
    batch = make_batch(case)
    cp = ContextParallel(dist.group.WORLD, strategy=case.strategy, page_size=case.page_size)
    outs, begin = [], 0
    for n in chunks:
        plan = cp.plan([n], [begin + n], block_tables=batch.block_tables)
        new = slice(begin, begin + n)
        q, k, v = (cp.shard(plan, x[new]) for x in (batch.q, batch.k[0], batch.v[0]))
        cp.write_kv(plan, k, v, batch.k_cache, batch.v_cache)
        outs.append(cp.gather(plan, cp.attend(plan, q, batch.k_cache, batch.v_cache)))
        begin += n
    return torch.cat(outs)


DISAGREEMENT = Case("disagreement", extend_lens=(5, 13), prefix_lens=(4, 0))
ODD_RANK = 1


def run_disagreements(rank: int) -> tuple[dict[str, tuple[str, float]], dict]:
    """What each rank is told, and after how long, if rank 1 does something else; then a batch."""
    case, batch = DISAGREEMENT, make_batch(DISAGREEMENT)
    is_odd = rank == ODD_RANK
    cps = [ContextParallel(dist.group.WORLD, page_size=case.page_size)]

    def write_kv(cp, plan, **pools):
        k, v = (cp.shard(plan, torch.zeros(plan.num_tokens, 2, 32)) for _ in "kv")
        pools = {"k_cache": batch.k_cache, "v_cache": batch.v_cache} | pools
        cp.write_kv(plan, k, v, **pools)

    def with_plan(**changes):
        write_kv(cps[0], make_plan(cps[0], case, batch, **(changes if is_odd else {})))

    def with_cp(**changes):
        options = {"strategy": "zigzag", "page_size": case.page_size}
        cp = ContextParallel(dist.group.WORLD, **(options | (changes if is_odd else {})))
        cp.gather(make_plan(cp, case, batch), torch.zeros(18, 8))

    def with_rows(rows):
        plan = make_plan(cps[0], case, batch)
        cps[0].gather(plan, rows if is_odd else torch.zeros(18, 8))

    def with_call():
        plan = make_plan(cps[0], case, batch)
        if is_odd:
            cps[0].gather(plan, torch.zeros(18, 8))
        else:
            write_kv(cps[0], plan)

    def with_pool():
        pool = batch.k_cache[:4] if is_odd else batch.k_cache
        write_kv(cps[0], make_plan(cps[0], case, batch), k_cache=pool)

    def with_history():
        plan = make_plan(cps[0], case, batch)
        if is_odd:
            cps[0] = ContextParallel(dist.group.WORLD, page_size=case.page_size)
        write_kv(cps[0], plan)

    other_tables = batch.block_tables.clone()
    other_tables[1, 0], other_tables[1, 1] = batch.block_tables[1, 1], batch.block_tables[1, 0]
    slots = make_plan(cps[0], case, batch).slots.copy()
    slots[3] = -1
    attempts = {
        "extend_lens": lambda: with_plan(extend_lens=[6, 12], seq_lens=[9, 13]),
        "prefix": lambda: with_plan(extend_lens=[5, 13], seq_lens=[8, 13]),
        "num_tokens": lambda: with_plan(num_tokens=20),
        "block_tables": lambda: with_plan(block_tables=other_tables),
        "slots": lambda: with_plan(out_cache_loc=slots),
        "mask": lambda: with_plan(custom_mask=torch.ones(5 * 9 + 13 * 13, dtype=torch.bool)),
        "strategy": lambda: with_cp(strategy="contiguous"),
        "page_size": lambda: with_cp(page_size=8),
        "dtype": lambda: with_rows(torch.zeros(18, 4, dtype=torch.float64)),
        "width": lambda: with_rows(torch.zeros(18, 7)),
        "call": with_call,
        "too few rows": lambda: with_rows(torch.zeros(2, 8)),
        "small pool": with_pool,
        "history": with_history,
    }
    told = {name: _error_of(attempt) for name, attempt in attempts.items()}
    assert torch.equal(batch.k_cache.isnan(), make_batch(case).k_cache.isnan())
    return told, run_case(dist.group.WORLD, case)


def _error_of(attempt) -> tuple[str, float]:
    start = time.monotonic()
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", 0.0


def run_loss(rank: int, how: str) -> tuple[str, float]:
    """What the others are told if the last rank is killed, or does not come."""
    case = replace(DISAGREEMENT, extend_lens=(5, 2000), head_dim=256, v_head_dim=256)
    batch = make_batch(case)
    cp = ContextParallel(dist.group.WORLD, page_size=case.page_size)
    plan = make_plan(cp, case, batch)
    if rank == cp.cp_size - 1:
        if how == "absent":
            return "absent", 0.0
        if how == "killed before it sends":
            cp._exchange.all_rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    k, v = (cp.shard(plan, torch.zeros(plan.num_tokens, 2, 256)) for _ in "kv")
    return _error_of(lambda: cp.write_kv(plan, k, v, batch.k_cache, batch.v_cache))


def run_death(rank: int) -> tuple[str, float, list[tuple[float, bool]]]:
    """What the others are told, and when, if the last rank is killed while its rows arrive.

    Rank 0 watches them arrive and kills it, and says when, and whether all were there by then. The
    times are those of the clock that all processes share.
    """
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    pids: list[int] = [0] * cp.cp_size
    dist.all_gather_object(pids, os.getpid())
    plan = cp.plan([6 * cp.cp_size], block_tables=[range(5)])
    rows = torch.ones(6, 16 << 20, dtype=torch.uint8)  # far more than sockets hold
    kills = []

    def watch(arriving: np.ndarray) -> None:
        deadline = time.monotonic() + PATIENCE
        while not arriving[0]:
            assert time.monotonic() < deadline
            time.sleep(0)
        kills.append((time.monotonic(), bool(arriving[-1])))
        os.kill(pids[-1], signal.SIGKILL)

    post = cp._exchange.post

    def watched(call, sends, receives):
        if call == "gather":
            arriving = receives[cp.cp_size - 1].zero_().view(-1)
            threading.Thread(target=watch, args=[arriving.numpy()], daemon=True).start()
        return post(call, sends, receives)

    if rank == 0:
        cp._exchange.post = watched
    message, _ = _error_of(lambda: cp.gather(plan, rows))
    return message, time.monotonic(), kills


def run_interrupt(rank: int) -> float:
    """How long Ctrl-C takes to end a wait for rank 1, which does not come."""
    if rank == 1:
        return 0.0
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    plan = cp.plan([8], block_tables=[[0, 1]])
    delay = 0.2
    start = time.monotonic()
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        cp.gather(plan, torch.zeros(4, 1))
    except KeyboardInterrupt:
        return time.monotonic() - start - delay
    raise AssertionError("not interrupted")


def run_subgroup(rank: int, case: Case) -> dict | str:
    """The case on ranks 1 and 2 of the world; rank 0 is not one of the group."""
    group = dist.new_group([1, 2])
    if rank == 0:
        try:
            ContextParallel(group, page_size=4)
        except TypeError as error:
            return str(error)
    return run_case(group, case)
