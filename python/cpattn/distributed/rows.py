# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks exchange, and the pools that they are written to, checked."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from .host import HostGroup
from .plan import ContextParallelPlan


def local_rows(call: str, plan: ContextParallelPlan, name: str, x: torch.Tensor) -> torch.Tensor:
    """x without rows of physical padding, as [num_local_rows, width]."""
    return rows_of(call, plan.num_local_rows, plan.cp_rank, name, x)


def rows_of(call: str, num_rows: int, cp_rank: int, name: str, x: torch.Tensor) -> torch.Tensor:
    """The first rows of x, as [num_rows, width]."""
    if x.device.type != "cpu":
        raise TypeError(f"ContextParallel.{call}: {name} must be on the CPU, got {x.device}")
    if len(x) < num_rows:
        raise ValueError(
            f"ContextParallel.{call}: {name} must have at least the {num_rows} rows of "
            f"rank {cp_rank}, got {len(x)}"
        )
    return x[:num_rows].reshape(num_rows, prod(x.shape[1:]))


def pool_rows(
    page_size: int,
    slots: NDArray[np.int64],
    name: str,
    cache: torch.Tensor,
    local: torch.Tensor,
) -> torch.Tensor:
    """The cache as [num_slots, width], after checking it against the rows to be written."""
    paged = cache.ndim == 4 and cache.shape[1] in (1, page_size)
    if local.ndim != 3 or not (cache.ndim == 3 or paged) or cache.shape[-2:] != local.shape[1:]:
        raise ValueError(
            f"ContextParallel.write_kv: {name} must be [num_slots, num_kv_heads, head_dim] or "
            f"[num_pages, {page_size}, num_kv_heads, head_dim] for rows "
            f"[num_rows, num_kv_heads, head_dim], got {list(cache.shape)} for {list(local.shape)}"
        )
    if cache.dtype != local.dtype or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.write_kv: {name} must be contiguous {local.dtype}, "
            f"got {cache.dtype} of strides {list(cache.stride())}"
        )
    pool = cache.view(-1, prod(cache.shape[-2:]))
    if len(slots) and slots.max() >= len(pool):
        i = int(slots.argmax())
        raise ValueError(
            f"ContextParallel.write_kv: slots must be below the {len(pool)} rows of {name}, "
            f"got slots[{i}] = {slots[i]}"
        )
    return pool


def write_own_rows(
    host: HostGroup,
    plan: ContextParallelPlan,
    pools: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
) -> None:
    """Write this rank's rows into pools that all ranks share, and wait until all have."""
    with host.without_return():
        slots = plan.own_slots
        for pool, part in zip(pools, parts, strict=True):
            if part.numel():
                _core.write_slot_rows(
                    slots, _as_bytes(part)[:, None], _as_bytes(pool)[:, None, None]
                )
        with _core.TraceSpan(_core.TraceScope.gather):
            host.meet("ContextParallel.write_kv")


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[num_rows, bytes of a row], whatever the dtype."""
    return (rows if rows.stride(1) == 1 else rows.contiguous()).detach().view(torch.uint8)
