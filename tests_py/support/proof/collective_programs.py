# SPDX-License-Identifier: Apache-2.0
"""Random programs of collectives and messages, equal for gloo and the simulator: sums are of
integers, whose order does not matter; all other results are compared bit for bit."""

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

_EXACT = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)


class Step:
    """Choices of a program's step, equal on all ranks except for `data`."""

    def __init__(self, chance: random.Random, group: dist.ProcessGroup | None) -> None:
        self.chance, self.group = chance, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.n = chance.randint(1, 20)
        self.seed = chance.randrange(1 << 30)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.root = self.ranks[chance.randrange(self.size)]
        self.dtype = chance.choice(_DTYPES)

    def data(self, n: int, salt: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.seed + 1000 * salt + self.rank)
        return torch.randint(0, 100, (n,), generator=made).to(dtype or self.dtype)

    def neighbours(self, distance: int = 1) -> tuple[int, int]:
        """Return the ranks at a distance behind this one and before it."""
        behind, before = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        return self.ranks[behind], self.ranks[before]

    def operator(self) -> tuple[dist.ReduceOp, torch.dtype]:
        """Return an operator, and a dtype for which the order of ranks makes no difference."""
        if self.chance.random() < 0.5:
            return self.chance.choice(_EXACT), torch.int64
        return self.chance.choice(_ORDERED), self.dtype


def _take(kind: str, step: Step) -> list[torch.Tensor]:
    """Take one step of a kind; return the rank's tensors after it."""
    x, group, n = step.data(step.n), step.group, step.n
    is_root = dist.get_rank() == step.root
    blocks = [torch.empty_like(x) for _ in range(step.size)]
    match kind:
        case "reduce":
            op, dtype = step.operator()
            x, y = step.data(n, dtype=dtype), step.data(n, 1, dtype)
            dist.all_reduce(x, op, group, async_op=True).wait()
            dist.reduce(y, step.root, op, group)
            return [x, y] if is_root else [x]
        case "broadcast":
            dist.broadcast(x.view(-1, 1), step.root, group)
            return [x]
        case "all_gather":
            dist.all_gather(blocks, x, group)
            single = torch.empty(step.size * n, dtype=step.dtype)
            dist.all_gather_single(single, x, group)
            return [*blocks, single]
        case "gather and scatter":
            back = torch.empty_like(x)
            dist.gather(x, blocks if is_root else None, step.root, group)
            given = [block + 1 for block in blocks] if is_root else None
            dist.scatter(back, given, step.root, group)
            return [*blocks, back] if is_root else [back]
        case "all_to_all":
            made = torch.Generator().manual_seed(step.seed)
            sizes = torch.randint(0, 4, (step.size, step.size), generator=made)
            gives, takes = sizes[step.rank].tolist(), sizes[:, step.rank].tolist()
            out = torch.empty(sum(takes), dtype=step.dtype)
            dist.all_to_all_single(out, step.data(sum(gives)), takes, gives, group)
            return [out]
        case "reduce_scatter":
            outs = [torch.empty(n, dtype=torch.int64) for _ in range(2)]
            parts = [step.data(n, salt, torch.int64) for salt in range(step.size)]
            dist.reduce_scatter(outs[0], parts, group=group)
            dist.reduce_scatter_single(outs[1], torch.cat(parts), group=group)
            return outs
        case "messages" if step.size > 1:
            behind, before = step.neighbours()
            out = torch.empty_like(x)
            sends = dist.P2POp(dist.isend, x, behind, group)
            for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, out, before, group)]):
                work.wait()
            return [out]
        case "objects":
            taken: list[dict[str, int]] = [{} for _ in range(step.size)]
            dist.all_gather_object(taken, {"rank": step.rank, "n": n}, group)
            shared = [step.rank * 10]
            dist.broadcast_object_list(shared, step.root, group)
            return [torch.tensor([one["rank"] for one in taken]), torch.tensor(shared)]
        case "functional":
            world, x = group or dist.group.WORLD, step.data(n, dtype=torch.int64)
            return [
                functional.all_reduce(x, "sum", world) + 0,
                functional.all_gather_single(x, 0, world) + 0,
                functional.reduce_scatter_single(x.repeat(step.size), "sum", 0, world) + 0,
                functional.all_to_all_single(x.repeat(step.size), None, None, world) + 0,
            ]
        case "barrier":
            dist.barrier(group)
    return []


_KINDS = ("reduce", "broadcast", "all_gather", "gather and scatter", "all_to_all", "reduce_scatter")
_KINDS += ("messages", "objects", "functional", "barrier")
STEPS: tuple[Callable[[Step], list[torch.Tensor]], ...] = tuple(partial(_take, x) for x in _KINDS)


def run_program(seed: int, num_steps: int) -> list[torch.Tensor]:
    """Return a rank's tensors after all steps, which the seed draws."""
    chance = random.Random(seed)
    size = dist.get_world_size()
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(half) for half in halves if half]
    mine = groups[0] if dist.get_rank() in halves[0] else groups[-1]
    results = []
    for number in range(num_steps):
        step = Step(random.Random(f"{seed} {number}"), mine if chance.random() < 0.3 else None)
        results += STEPS[(number + seed) % len(STEPS)](step)
    return results


def run_programs(rank: int, seeds: Sequence[int], num_steps: int) -> list[list[torch.Tensor]]:
    return [run_program(seed, num_steps) for seed in seeds]
