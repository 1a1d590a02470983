# SPDX-License-Identifier: Apache-2.0
"""Random programs of collectives and messages, the same for gloo and for the simulator.

Sums are of integers, whose order is nobody's business; all else is moved or compared, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

_EXACT = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)


class Step:
    """What the step of a program chooses from: the same on all ranks, but for `data`."""

    def __init__(self, chance: random.Random, group: dist.ProcessGroup | None) -> None:
        self.chance, self.group = chance, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.n = chance.randint(1, 20)
        self.seed = chance.randrange(1 << 30)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.root = self.ranks[chance.randrange(self.size)]
        self.dtype = chance.choice(_DTYPES)

    def data(self, n: int, salt: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers of this rank."""
        made = torch.Generator().manual_seed(self.seed + 1000 * salt + self.rank)
        return torch.randint(0, 100, (n,), generator=made).to(dtype or self.dtype)

    def neighbours(self, distance: int = 1) -> tuple[int, int]:
        """The ranks so far behind this one and before it."""
        behind, before = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        return self.ranks[behind], self.ranks[before]

    def operator(self) -> tuple[dist.ReduceOp, torch.dtype]:
        """One, and a dtype for which the order of ranks makes no difference."""
        if self.chance.random() < 0.5:
            return self.chance.choice(_EXACT), torch.int64
        return self.chance.choice(_ORDERED), self.dtype


def _all_reduce(step: Step) -> list[torch.Tensor]:
    op, dtype = step.operator()
    x, y = step.data(step.n, dtype=dtype), step.data(step.n, 1, dtype)
    dist.all_reduce(x, op, step.group, async_op=True).wait()
    dist.reduce(y, step.root, op, step.group)
    return [x, y] if dist.get_rank() == step.root else [x]


def _broadcast(step: Step) -> list[torch.Tensor]:
    x = step.data(step.n).reshape(-1, 1)
    dist.broadcast(x, step.root, step.group)
    return [x]


def _all_gather(step: Step) -> list[torch.Tensor]:
    x = step.data(step.n)
    taken = [torch.empty_like(x) for _ in range(step.size)]
    dist.all_gather(taken, x, step.group)
    single = torch.empty(step.size * step.n, dtype=step.dtype)
    dist.all_gather_single(single, x, step.group)
    return [*taken, single]


def _gather_scatter(step: Step) -> list[torch.Tensor]:
    x, back = step.data(step.n), torch.empty(step.n, dtype=step.dtype)
    here = dist.get_rank() == step.root
    taken = [torch.empty_like(x) for _ in range(step.size)] if here else None
    dist.gather(x, taken, step.root, step.group)
    given = [block + 1 for block in taken] if taken else None
    dist.scatter(back, given, step.root, step.group)
    return [*(taken or []), back]


def _all_to_all(step: Step) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step.seed)
    sizes = torch.randint(0, 4, (step.size, step.size), generator=made)
    gives, takes = sizes[step.rank].tolist(), sizes[:, step.rank].tolist()
    out = torch.empty(sum(takes), dtype=step.dtype)
    dist.all_to_all_single(out, step.data(sum(gives)), takes, gives, step.group)
    return [out]


def _reduce_scatter(step: Step) -> list[torch.Tensor]:
    out = torch.empty(step.n, dtype=torch.int64)
    parts = [step.data(step.n, salt, torch.int64) for salt in range(step.size)]
    dist.reduce_scatter(out, parts, group=step.group)
    single = torch.empty(step.n, dtype=torch.int64)
    dist.reduce_scatter_single(single, torch.cat(parts), group=step.group)
    return [out, single]


def _messages(step: Step) -> list[torch.Tensor]:
    if step.size == 1:
        return []
    behind, before = step.neighbours()
    out = torch.empty(step.n, dtype=step.dtype)
    operations = [
        dist.P2POp(dist.isend, step.data(step.n), behind, step.group),
        dist.P2POp(dist.irecv, out, before, step.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [out]


def _objects(step: Step) -> list[torch.Tensor]:
    taken: list[dict[str, int]] = [{} for _ in range(step.size)]
    dist.all_gather_object(taken, {"rank": step.rank, "n": step.n}, step.group)
    shared = [step.rank * 10]
    dist.broadcast_object_list(shared, step.root, step.group)
    return [torch.tensor([one["rank"] for one in taken]), torch.tensor(shared)]


def _functional(step: Step) -> list[torch.Tensor]:
    group = step.group or dist.group.WORLD
    x = step.data(step.n, dtype=torch.int64)
    return [
        functional.all_reduce(x, "sum", group) + 0,
        functional.all_gather_single(x, 0, group) + 0,
        functional.reduce_scatter_single(x.repeat(step.size), "sum", 0, group) + 0,
        functional.all_to_all_single(x.repeat(step.size), None, None, group) + 0,
    ]


def _barrier(step: Step) -> list[torch.Tensor]:
    dist.barrier(step.group)
    return []


STEPS: tuple[Callable[[Step], list[torch.Tensor]], ...] = (
    _all_reduce, _broadcast, _all_gather, _gather_scatter, _all_to_all, _reduce_scatter,
    _messages, _objects, _functional, _barrier,
)  # fmt: skip


def run_program(seed: int, num_steps: int) -> list[torch.Tensor]:
    """What a rank has after all steps; the steps are drawn by the seed."""
    chance = random.Random(seed)
    size = dist.get_world_size()
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(half) for half in halves if half]
    mine = groups[0] if dist.get_rank() in halves[0] else groups[-1]
    results = []
    for number in range(num_steps):
        group = mine if chance.random() < 0.3 else None
        step = Step(random.Random(f"{seed} {number}"), group)
        results += STEPS[(number + seed) % len(STEPS)](step)
    return results


def run_programs(rank: int, seeds: Sequence[int], num_steps: int) -> list[list[torch.Tensor]]:
    """All programs on a rank."""
    return [run_program(seed, num_steps) for seed in seeds]
