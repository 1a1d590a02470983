# SPDX-License-Identifier: Apache-2.0
"""Programs of gloo ranks, to compare with simulated ranks or to record their calls."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.captures import capture
from cpattn.distributed import ContextParallel
from cpattn.kv import PageInterleave, TokenInterleave
from support.distributed.ring_worker import Case, run_cases

LENS = {"extend_lens": [9, 4], "seq_lens": [14, 4], "block_tables": [[0, 2, 3, 1], [5, -1, -1, -1]]}
_EXTEND, _WHOLE = [40, 23], [72, 23]
_TABLES = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]], dtype=torch.int32)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))


def prefill(
    strategy: str, transport: str = "auto", leaver: int | None = None
) -> tuple[torch.Tensor | None, ContextParallel]:
    """Return outputs of all new tokens; the rank `leaver` ends before attention."""
    cp = ContextParallel(dist.group.WORLD, strategy=strategy, page_size=16, transport=transport)
    plan = cp.plan(_EXTEND, _WHOLE, block_tables=_TABLES)
    q, k, v = _numbers(63, 4, 32), _numbers(63, 2, 32), _numbers(63, 2, 32) * 2
    k_cache, v_cache = _numbers(16, 16, 2, 32), _numbers(16, 16, 2, 32) * 2
    q, k, v = (cp.shard(plan, x) for x in (q, k, v))
    cp.write_kv(plan, k, v, k_cache, v_cache)
    if dist.get_rank() == leaver:
        return None, cp
    return cp.gather(plan, cp.attend(plan, q, k_cache, v_cache)), cp


def prefills(rank: int, isa: str, strategies: Sequence[str]) -> list[torch.Tensor | None]:
    _core.set_isa(isa)  # bits depend on the instruction set
    return [prefill(strategy, "tcp")[0] for strategy in strategies]


def run_ring(rank: int, isa: str, cases: list[Case]) -> dict[Case, tuple[torch.Tensor, ...]]:
    _core.set_isa(isa)
    return run_cases(rank, cases)


def record_layer(rank: int, folder: Path, strategy: str = "zigzag") -> list[int]:
    """Record two batches; return the bytes that the rank has sent after each."""
    sent = []
    with capture(folder / "run{rank}.cpcap"):
        cp = ContextParallel(dist.group.WORLD, strategy=strategy, page_size=4, transport="tcp")
        for _ in range(2):
            plan = cp.plan(**LENS)
            rows = torch.randn(plan.num_tokens, 2, 16)
            q, k = cp.shard(plan, rows), cp.shard(plan, rows[:, :1])
            caches = torch.zeros(2, 6, 4, 1, 16)
            cp.write_kv(plan, k, k, *caches)
            cp.attend(plan, q, *caches)
            sent.append(cp.sent_bytes)
    return sent


def record_shares(rank: int, folder: Path) -> None:
    """Record plans of a batch and of a decode step, over pools sharded by pages and by tokens."""
    ranks = {"shard_size": dist.get_world_size()}
    for placement in (PageInterleave(**ranks, page_size=4), TokenInterleave(**ranks, interleave=2)):
        with capture(folder / f"{type(placement).__name__}{{rank}}.cpcap"):
            cp = ContextParallel(dist.group.WORLD, page_size=4, placement=placement)
            cp.plan(**LENS)
            cp.plan_decode(LENS["seq_lens"], block_tables=LENS["block_tables"])
