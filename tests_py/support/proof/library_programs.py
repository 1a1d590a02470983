# SPDX-License-Identifier: Apache-2.0
"""What ranks of gloo do beside simulated ones: `ContextParallel`, ring-flash-attn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.distributed import ContextParallel
from support.distributed.ring_worker import Case, run_cases

_EXTEND, _WHOLE = [40, 23], [72, 23]
_TABLES = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]], dtype=torch.int32)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))


def prefill(
    strategy: str, transport: str = "auto", leaver: int | None = None
) -> tuple[torch.Tensor | None, ContextParallel]:
    """Outputs of all tokens behind cached ones; a rank that leaves goes before the attention."""
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
    """Outputs of a rank by each strategy, over the process group."""
    _core.set_isa(isa)  # bits are those of an instruction set
    return [prefill(strategy, "tcp")[0] for strategy in strategies]


def run_ring(rank: int, isa: str, cases: list[Case]) -> dict[Case, tuple[torch.Tensor, ...]]:
    """The cases of ring-flash-attn, on kernels of one instruction set."""
    _core.set_isa(isa)
    return run_cases(rank, cases)
