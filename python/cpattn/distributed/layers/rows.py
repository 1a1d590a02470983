# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks exchange, and the pools that receive them, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from ... import _core
from ..plans.plan import ContextParallelPlan

Indices = NDArray[np.int64] | torch.Tensor


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
        raise ValueError(
            f"ContextParallel.{call}: slots must be below the {len(pool)} rows of {name}, "
            f"got {slots.max()}"
        )
    return pool


@dataclass(frozen=True)
class NewRows:
    """Checked new keys and values of this rank, and the pools that receive those of all ranks."""

    rows: list[torch.Tensor]  # [num_local_rows, width]
    pools: list[torch.Tensor]  # [num_slots, width]
    slots: NDArray[np.int64]  # of the rows of all ranks; -1 for those that are not written

    def store(self, gathered: Sequence[torch.Tensor]) -> None:
        """Write the rows of all ranks that belong into this rank's pools."""
        put_rows(self.pools, self.slots, gathered)

    def store_heads(
        self, heads: slice | list[int], slots: Indices, gathered: Sequence[torch.Tensor]
    ) -> None:
        """Write some heads of rows [num_rows, len(heads), dim] into slots of the pools."""
        if not isinstance(heads, slice):
            for i, head in enumerate(heads):
                one = [rows[:, i : i + 1] for rows in gathered]
                self.store_heads(slice(head, head + 1), slots, one)
            return
        pools = [
            pool.unflatten(1, (-1, rows.shape[2]))[:, heads]
            for pool, rows in zip(self.pools, gathered, strict=True)
        ]
        put_rows(pools, slots, gathered)


def new_rows(
    call: str,
    names: Sequence[str],
    num_rows: int,
    cp_rank: int,
    page_size: int,
    slots: NDArray[np.int64],
    local: Sequence[torch.Tensor | None],
    caches: Sequence[torch.Tensor | None],
) -> NewRows:
    """Check rows of keys, and of values if there are any, against their caches, called `names`."""
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
    shortest = min(map(len, pools))
    return NewRows(rows, [pool[:shortest] for pool in pools], slots)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy some rows; codes go as bytes, the only form torch can move."""
    if x.element_size() > 1:
        return x.index_select(0, rows)
    return x.view(torch.uint8).index_select(0, rows).view(x.dtype)


def put_rows(pools: Sequence[torch.Tensor], slots: Indices, rows: Sequence[torch.Tensor]) -> None:
    """Write row i of each of `rows` into row ``slots[i]`` of its pool; -1 skips a row.

    Rows are [num_rows, width] or [num_rows, heads, dim], of any dtype.
    """
    read = [x if x.stride(-1) == 1 else x.contiguous() for x in rows]
    _core.write_slot_rows(slots, [_as_bytes(x) for x in read], [_as_bytes(x) for x in pools])


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return rows of any dtype as [num_rows, heads, bytes]."""
    return (x.unsqueeze(1) if x.ndim == 2 else x).detach().view(torch.uint8)


def plan_rows(
    call: str,
    plan: ContextParallelPlan,
    local: Sequence[torch.Tensor | None],
    caches: Sequence[torch.Tensor | None],
) -> NewRows:
    """Return rows of keys and values for caches that hold all tokens."""
    return new_rows(
        call, ("k_cache", "v_cache"), plan.num_local_rows, plan.cp_rank, plan.page_size,
        plan.row_slots, local, caches,
    )  # fmt: skip
