# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks exchange, and the pools that receive them, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from ..plans.plan import ContextParallelPlan


def check_tensor(call: str, name: str, x: torch.Tensor) -> None:
    """Refuse a tensor that is not on the CPU, or that requires a gradient in grad mode."""
    if x.device.type != "cpu":
        raise TypeError(f"ContextParallel.{call}: {name} must be on the CPU, got {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"ContextParallel.{call}: {name} requires a gradient, which cpattn does not compute; "
            f"call it under torch.no_grad() or pass {name}.detach()"
        )


def check_written(call: str, name: str, x: torch.Tensor) -> None:
    """Refuse what `check_tensor` refuses, and a tensor in which torch would not write rows."""
    check_tensor(call, name, x)
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise TypeError(
            f"ContextParallel.{call}: {name} must not be an inference tensor outside "
            f"torch.inference_mode(), where torch does not write it, got one of {list(x.shape)}"
        )


def rows_of(call: str, num_rows: int, cp_rank: int, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the first rows of x, as [num_rows, width]."""
    check_tensor(call, name, x)
    if len(x) < num_rows:
        raise ValueError(
            f"ContextParallel.{call}: {name} must have at least the {num_rows} rows of "
            f"rank {cp_rank}, got {len(x)}"
        )
    return x[:num_rows].reshape(num_rows, prod(x.shape[1:]))


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """Return [rows, heads, dim] as [rows, heads * dim] with adjacent columns.

    The result is a view if x allows it. It is a copy if collapsed axes have strides of their own,
    as in expanded tensors, or heads of one dimension with gaps between them.
    """
    flat = x.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def pool_rows(
    call: str,
    page_size: int,
    slots: NDArray[np.int64],
    name: str,
    cache: torch.Tensor,
    local: torch.Tensor,
) -> torch.Tensor:
    """Return the cache as [num_slots, width], checked against the rows to write."""
    paged = cache.ndim == 4 and cache.shape[1] in (1, page_size)
    if local.ndim != 3 or not (cache.ndim == 3 or paged) or cache.shape[-2:] != local.shape[1:]:
        raise ValueError(
            f"ContextParallel.{call}: {name} must be [num_slots, num_kv_heads, head_dim] or "
            f"[num_pages, {page_size}, num_kv_heads, head_dim] for rows "
            f"[num_rows, num_kv_heads, head_dim], got {list(cache.shape)} for {list(local.shape)}"
        )
    if cache.dtype != local.dtype or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.{call}: {name} must be contiguous {local.dtype}, "
            f"got {cache.dtype} of strides {list(cache.stride())}"
        )
    check_written(call, name, cache)
    pool = cache.view(-1, prod(cache.shape[-2:]))
    if len(slots) and slots.max() >= len(pool):
        i = int(slots.argmax())
        raise ValueError(
            f"ContextParallel.{call}: slots must be below the {len(pool)} rows of {name}, "
            f"got slots[{i}] = {slots[i]}"
        )
    return pool


@dataclass(frozen=True)
class NewRows:
    """Checked new keys and values of this rank, and the pools that receive those of all ranks."""

    rows: list[torch.Tensor]  # [num_local_rows, width]
    pools: list[torch.Tensor]  # [num_slots, width]
    slots: torch.Tensor  # to write
    sources: torch.Tensor  # index among the rows of all ranks, one for each slot

    def store(self, gathered: Sequence[torch.Tensor]) -> None:
        """Write the rows of all ranks that belong into this rank's pools."""
        # All are made before any is written: memory may run out at the second.
        chosen = [take_rows(rows, self.sources) for rows in gathered]
        for pool, rows in zip(self.pools, chosen, strict=True):
            put_rows(pool, self.slots, rows)

    def store_heads(self, heads: slice, gathered: Sequence[torch.Tensor]) -> None:
        """Write some heads of all ranks' rows, [num_tokens, len(heads), dim], into the pools."""
        self.put_heads(heads, [take_rows(new, self.sources) for new in gathered])

    def put_heads(self, heads: slice | list[int], chosen: Sequence[torch.Tensor]) -> None:
        """Write only the rows of `sources`, [len(sources), len(heads), dim]."""
        for pool, new in zip(self.pools, chosen, strict=True):
            by_heads = pool.unflatten(1, (-1, new.shape[2]))
            if isinstance(heads, slice):
                put_rows(by_heads[:, heads], self.slots, new)
                continue
            for i, head in enumerate(heads):
                put_rows(by_heads[:, head], self.slots, new[:, i])


def new_rows(
    call: str,
    names: Sequence[str],
    num_rows: int,
    cp_rank: int,
    page_size: int,
    slots: NDArray[np.int64],
    sources: torch.Tensor,
    local: Sequence[torch.Tensor | None],
    caches: Sequence[torch.Tensor | None],
) -> NewRows:
    """Check rows of keys, and of values if there are any, against their caches.

    `names` are those of the caches; `slots` and `sources` are as in `NewRows`, but slots of -1 are
    not written.
    """
    (k_local, v_local), (k_cache, v_cache) = local, caches
    if (v_local is None) != (v_cache is None):
        missing = "v_local" if v_local is None else names[1]
        raise ValueError(
            f"ContextParallel.{call}: v_local and {names[1]} must be given together, got no "
            f"{missing}"
        )
    if k_local is None or k_cache is None:
        missing = "k_local" if k_local is None else names[0]
        raise TypeError(f"ContextParallel.{call}: {missing} must be a tensor, got None")
    rows = [rows_of(call, num_rows, cp_rank, "k_local", k_local)]
    pools = [pool_rows(call, page_size, slots, names[0], k_cache, k_local)]
    if v_local is not None and v_cache is not None:
        rows.append(rows_of(call, num_rows, cp_rank, "v_local", v_local))
        pools.append(pool_rows(call, page_size, slots, names[1], v_cache, v_local))
    written = slots >= 0
    return NewRows(
        rows, pools, torch.from_numpy(slots[written]), sources[torch.from_numpy(written)]
    )


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy some rows; codes go as bytes, the only form torch can move."""
    if x.element_size() > 1:
        return x.index_select(0, rows)
    return x.view(torch.uint8).index_select(0, rows).view(x.dtype)


def put_rows(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write some rows of x, also of codes."""
    if x.element_size() == 1:
        x, values = x.view(torch.uint8), values.view(torch.uint8)
    x.index_copy_(0, rows, values)


def plan_rows(
    call: str,
    plan: ContextParallelPlan,
    local: Sequence[torch.Tensor | None],
    caches: Sequence[torch.Tensor | None],
) -> NewRows:
    """Return rows of keys and values for caches that hold all tokens."""
    return new_rows(
        call, ("k_cache", "v_cache"), plan.num_local_rows, plan.cp_rank, plan.page_size, plan.slots,
        plan.gathered_rows, local, caches,
    )  # fmt: skip
