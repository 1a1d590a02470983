# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks exchange, and the pools that they are written to, checked."""

from __future__ import annotations

from math import prod

import torch

from .plan import ContextParallelPlan


def local_rows(call: str, plan: ContextParallelPlan, name: str, x: torch.Tensor) -> torch.Tensor:
    """x without rows of physical padding, as [num_local_rows, width]."""
    if x.device.type != "cpu":
        raise TypeError(f"ContextParallel.{call}: {name} must be on the CPU, got {x.device}")
    if len(x) < plan.num_local_rows:
        raise ValueError(
            f"ContextParallel.{call}: {name} must have at least the {plan.num_local_rows} rows of "
            f"rank {plan.cp_rank}, got {len(x)}"
        )
    return x[: plan.num_local_rows].reshape(plan.num_local_rows, prod(x.shape[1:]))


def pool_rows(
    plan: ContextParallelPlan, name: str, cache: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """The cache as [num_slots, width], after checking it against the rows to be written."""
    paged = cache.ndim == 4 and cache.shape[1] in (1, plan.page_size)
    if local.ndim != 3 or not (cache.ndim == 3 or paged) or cache.shape[-2:] != local.shape[1:]:
        raise ValueError(
            f"ContextParallel.write_kv: {name} must be [num_slots, num_kv_heads, head_dim] or "
            f"[num_pages, {plan.page_size}, num_kv_heads, head_dim] for rows "
            f"[num_rows, num_kv_heads, head_dim], got {list(cache.shape)} for {list(local.shape)}"
        )
    if cache.dtype != local.dtype or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.write_kv: {name} must be contiguous {local.dtype}, "
            f"got {cache.dtype} of strides {list(cache.stride())}"
        )
    pool = cache.view(-1, prod(cache.shape[-2:]))
    if plan.num_tokens and plan.slots.max() >= len(pool):
        i = int(plan.slots.argmax())
        raise ValueError(
            f"ContextParallel.write_kv: slots must be below the {len(pool)} rows of {name}, "
            f"got slots[{i}] = {plan.slots[i]}"
        )
    return pool
