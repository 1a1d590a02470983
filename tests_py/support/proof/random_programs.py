# SPDX-License-Identifier: Apache-2.0
"""Random programs without a fault, on simulated ranks: whatever is found in one is a false alarm.
`make false-alarms-programs` runs them, ``--only 12345 --seed 7`` one of them again."""

import os
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.update(CPATTN_NUM_THREADS="1", OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

from cpattn import build_cp_metadata
from cpattn.context_parallel.halo import plan_halo, plan_relayout
from cpattn.distributed import ContextParallel
from cpattn.kv import PageInterleave, TokenInterleave
from cpattn_proof import NotUsable, simulate
from support.proof.alarms import count_alarms
from support.proof.collective_programs import STEPS, Step

_MOST_RANKS = 8


def _works(step: Step) -> list[torch.Tensor]:
    """Begin several collectives and messages, and wait for them in the rank's own order."""
    own = random.Random(f"{step.seed} {dist.get_rank()}")
    begun = [_begin(step, salt) for salt in range(step.chance.randint(2, 5))]
    aside = torch.arange(8.0)  # tensors in flight stay untouched
    results: list[torch.Tensor] = []
    own.shuffle(begun)
    for works, outputs in begun:
        aside = aside * 2 + 1
        for work in works:
            if own.random() < 0.3:
                work.is_completed()
            work.wait()
        results += [output + 0 for output in outputs]
    return [sum((result.sum() for result in results), start=torch.tensor(0)), aside]


def _begin(step: Step, salt: int) -> tuple[list[dist.Work], list[torch.Tensor]]:
    """Begin a call; return its works and outputs."""
    x = step.data(step.n, salt, torch.int64)
    match step.chance.randrange(4):
        case 0:
            return [dist.all_reduce(x, group=step.group, async_op=True)], [x]
        case 1:
            return [dist.broadcast(x, step.root, step.group, async_op=True)], [x]
        case 2:
            taken = [torch.empty_like(x) for _ in range(step.size)]
            return [dist.all_gather(taken, x, step.group, async_op=True)], taken
    if step.size == 1:
        return [], []
    (behind, before), out = step.neighbours(), torch.empty_like(x)
    posts: list[Callable[[], dist.Work]] = [  # some ranks post the receive first
        lambda: dist.isend(x, behind, step.group, tag=salt),
        lambda: dist.irecv(out, before, step.group, tag=salt),
    ]
    return [post() for post in posts[:: -1 if step.rank % 2 else 1]], [out]


def _ring(step: Step) -> list[torch.Tensor]:
    """Pass blocks round a ring, one way or the other, while computing with the last one."""
    behind, before = step.neighbours(step.chance.choice((1, -1)))
    block = step.data(step.n, dtype=torch.int64)
    total = torch.zeros(step.n, dtype=torch.int64)
    for _ in range(step.size - 1):
        arriving = torch.empty_like(block)
        operations = [
            dist.P2POp(dist.isend, block, behind, step.group),
            dist.P2POp(dist.irecv, arriving, before, step.group),
        ]
        works = dist.batch_isend_irecv(operations)
        total = total * 3 + block
        for work in works:
            work.wait()
        block = arriving
    return [total, block]


def _blocking_ring(step: Step) -> list[torch.Tensor]:
    """Pass round a ring: even ranks send first, odd ones receive first."""
    if step.size == 1:
        return []
    behind, before = step.neighbours()
    x, out = step.data(step.n), torch.empty(step.n, dtype=step.dtype)
    calls = [(dist.send, x, behind), (dist.recv, out, before)]
    for call, tensor, peer in calls[:: -1 if step.rank % 2 else 1]:
        call(tensor, peer, step.group)
    return [out]


def _to_all(step: Step) -> list[torch.Tensor]:
    """Send messages to all ranks and itself, which NCCL allows within a batch."""
    taken = [torch.empty(step.n, dtype=step.dtype) for _ in step.ranks]
    x = step.data(step.n)
    operations = [dist.P2POp(dist.isend, x, peer, step.group) for peer in step.ranks]
    operations += [
        dist.P2POp(dist.irecv, out, peer, step.group)
        for out, peer in zip(taken, step.ranks, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(taken[step.rank], x)
    return taken


def _from_any(step: Step) -> list[torch.Tensor]:
    """Sum integers from any ranks; their order makes no difference.

    The tag belongs to this step, since a rank that has sent may already be in the next one.
    """
    tag = 10 + step.seed
    total = torch.zeros(step.n, dtype=torch.int64)
    if dist.get_rank() != step.root:
        dist.send(step.data(step.n, dtype=torch.int64), step.root, step.group, tag)
        return []
    for _ in range(step.size - 1):
        x = torch.empty(step.n, dtype=torch.int64)
        dist.recv(x, group=step.group, tag=tag)
        total += x
    return [total]


def _context_parallel(step: Step) -> list[torch.Tensor]:
    chance = step.chance
    extend = [chance.randint(0, 30) for _ in range(chance.randint(1, 3))]
    extend[0] += 1
    whole = [new + chance.choice((0, chance.randint(0, 20))) for new in extend]
    options = _layout_options(step)
    pages = -(-max(whole) // 4)
    tables = torch.arange(len(extend) * pages, dtype=torch.int32).view(len(extend), pages)
    cp = ContextParallel(step.group or dist.group.WORLD, page_size=4, **options)
    made = torch.Generator().manual_seed(step.seed)
    q, k, v = (torch.randn(sum(extend), heads, 16, generator=made) for heads in (2, 1, 1))
    caches = torch.randn(2, len(extend) * pages, 4, 1, 16, generator=made)
    sides = {"window": chance.choice((None, 3)), "causal": True}
    if chance.random() < 0.3:
        sides = {"window": (chance.choice((None, 3)), 2), "causal": False}
    for _ in range(chance.randint(1, 2)):
        plan = cp.plan(extend, whole, block_tables=tables)
        shards = [cp.shard(plan, x) for x in (q, k, v)]
        cp.write_kv(plan, *shards[1:], *caches)
        out = cp.gather(plan, cp.attend(plan, shards[0], *caches, **sides))
    if "placement" in options and step.size > 1:
        decode = cp.plan_decode([max(n, 1) for n in whole], block_tables=tables)
        out = cp.decode(decode, q[: len(whole)], *caches)
    return [out]


def _layout_options(step: Step) -> dict[str, Any]:
    """Choose equal or weighted ranks, and whole pools or pools sharded by pages or tokens."""
    chance = step.chance
    options: dict[str, Any] = {"strategy": chance.choice(("zigzag", "interleave", "contiguous"))}
    if options["strategy"] != "interleave" and chance.random() < 0.5:
        options["weights"] = [chance.randint(1, 5) for _ in range(step.size)]
    match chance.randrange(3):
        case 0:
            options["placement"] = PageInterleave(shard_size=step.size, page_size=4)
        case 1:
            options["placement"] = TokenInterleave(shard_size=step.size, interleave=2)
    return options


def _moved_rows(step: Step) -> list[torch.Tensor]:
    """Move rows of a batch from one layout to another, and rows of a halo between ranks."""
    lens = [step.chance.randint(1, 30) for _ in range(step.chance.randint(1, 3))]
    cuts = [
        build_cp_metadata(lens, cp_rank=step.rank, cp_size=step.size, strategy=strategy)
        for strategy in step.chance.sample(("zigzag", "interleave", "contiguous"), 2)
    ]
    x = torch.tensor(list(cuts[0].local_q_indices), dtype=torch.int64)
    results = []
    for plan in (plan_relayout(*cuts), plan_halo(cuts[0], window=5, ratio=3)):
        counts = plan.recv_counts, plan.send_counts
        out = x.new_empty(sum(counts[0]))
        sent = x[torch.from_numpy(plan.send_indices)]
        dist.all_to_all_single(out, sent, *counts, group=step.group)
        results.append(out + 0)
    return results


_ALL = (
    *STEPS, _works, _works, _works, _ring, _ring, _blocking_ring, _to_all, _from_any,
    _context_parallel, _moved_rows,
)  # fmt: skip


def _new_groups(chance: random.Random) -> tuple[list[list[int]], list[Any]]:
    size = dist.get_world_size()
    members = [
        sorted(chance.sample(range(size), chance.randint(1, size)))
        for _ in range(chance.randint(0, 3))
    ]
    return members, [dist.new_group(ranks) for ranks in members]


def run(seed: int, number: int) -> list[torch.Tensor]:
    """Run steps on random groups, made perhaps twice: then their names stand for other ranks."""
    chance = random.Random(f"{seed} {number} steps")
    members, groups = _new_groups(chance)
    if chance.random() < 0.5:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        members, groups = _new_groups(chance)
    results: list[torch.Tensor] = []
    for step in range(chance.randint(1, 6)):
        which = chance.randrange(-2, len(groups))
        kind, of_step = chance.choice(_ALL), random.Random(f"{seed} {number} {step}")
        if which < 0 or dist.get_rank() in members[which]:
            results += kind(Step(of_step, None if which < 0 else groups[which]))
    dist.barrier()
    return results


def alarm_of(seed: int, number: int) -> str | None:
    """Return findings in a program in two orders, or that it is not judged; else None."""
    chance = random.Random(f"{seed} {number}")
    size, seeds = chance.randint(2, _MOST_RANKS), (0, chance.randint(1, 1 << 20))
    options = {"seeds": seeds, "buffered_sends": chance.random() < 0.3, "time_limit": 600}
    try:
        report = simulate(partial(run, seed, number), size, **options)
    except NotUsable as error:
        return f"cannot be judged: {error}"
    if set(report.not_checked) != {"results"}:  # programs without assertions do not check results
        return f"not checked: {dict(report.not_checked)}"
    return None if report.proved else report.text()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.exit(count_alarms(__doc__, "programs", alarm_of))
