# SPDX-License-Identifier: Apache-2.0
"""Rank programs that hang or lose rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...findings import Report
from ..entry import ZooEntry

# Programs import torch only when they run.


def _draft_steps(*, agreed: bool) -> None:
    """Each speculative step gathers; a rank's own requests determine its number of steps."""
    import torch
    import torch.distributed as dist

    steps = torch.tensor([1 if dist.get_rank() == 0 else 3])
    if agreed:
        dist.all_reduce(steps, dist.ReduceOp.MAX)
    for _ in range(int(steps)):
        hidden = torch.ones(4)
        dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], hidden)


def _free_blocks(*, agreed: bool) -> None:
    """Ranks with room admit a request together; one rank has a block less."""
    import torch
    import torch.distributed as dist

    room = torch.tensor([3 if dist.get_rank() == 1 else 4])
    if agreed:
        dist.all_reduce(room, dist.ReduceOp.MIN)
    if room >= 4:
        dist.broadcast(torch.zeros(8), src=0)


def _prefetch(*, agreed: bool) -> None:
    """Ranks agree on cached pages request by request, each only for requests in its own cache."""
    import torch
    import torch.distributed as dist

    hits = {0: [5, 9], 1: [5, 9], 2: [5], 3: [5, 9]}[dist.get_rank()]
    requests = [5, 9] if agreed else hits
    for request in requests:
        pages = torch.tensor([request if request in hits else 0])
        dist.all_reduce(pages, dist.ReduceOp.MIN)
    dist.barrier()


def _all_to_all_plan(*, agreed: bool) -> None:
    """Every rank plans which rows it sends; only one of two ranks counts a shared root."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    lengths, shared = (7441, 11949, 12075), 512
    rows = [sum(lengths) // size // size] * size
    takes = list(rows)
    if rank == 1:
        takes[0] += shared  # it waits for the root of its sequence from rank 0, too
    if rank == 0 and agreed:
        rows[1] += shared
    out = torch.empty(sum(takes))
    dist.all_to_all_single(out, torch.ones(sum(rows)), takes, rows)


def _ulysses(*, agreed: bool) -> None:
    """A sequence of 9 tokens is cut for 2 ranks."""
    import torch
    import torch.distributed as dist

    size, tokens = dist.get_world_size(), torch.arange(9.0)
    if agreed:
        tokens = torch.nn.functional.pad(tokens, (0, -len(tokens) % size))
    dist.all_to_all_single(torch.empty_like(tokens), tokens)


def _reports(
    program: Callable[..., None], ranks: int
) -> tuple[Callable[[], Report], Callable[[], Report]]:
    def run(*, agreed: bool) -> Report:
        from ...simulation import simulate

        return simulate(partial(program, agreed=agreed), ranks)

    return partial(run, agreed=False), partial(run, agreed=True)


def _entry(
    bug: str, invariant: str, story: str, program: Callable[..., None], ranks: int
) -> ZooEntry:
    repository, number = bug.split("#")
    link = f"https://github.com/{repository}/issues/{number}"
    return ZooEntry(bug, link, "simulate", invariant, story, *_reports(program, ranks))


ENTRIES: Sequence[ZooEntry] = (
    _entry(
        "vllm-project/vllm-ascend#12036",
        "SEQ",
        "One group of ranks runs one draft step, the other three, and each step communicates.",
        _draft_steps,
        2,
    ),
    _entry(
        "NVIDIA/TensorRT-LLM#14020",
        "SEQ",
        "A collective is behind a test of the rank's own free blocks.",
        _free_blocks,
        2,
    ),
    _entry(
        "sgl-project/sglang#30760",
        "SEQ",
        "Ranks whose host caches differ reduce a different number of times.",
        _prefetch,
        4,
    ),
    _entry(
        "OpenPipe/ART#840",
        "SEQ",
        "Ranks disagree on the sizes of an all-to-all, for roots that sequences share.",
        _all_to_all_plan,
        4,
    ),
    _entry(
        "deepspeedai/DeepSpeed#7384",
        "OWN",
        "A sequence that the ranks do not divide loses its remainder.",
        _ulysses,
        2,
    ),
)
