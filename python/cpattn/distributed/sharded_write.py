# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.write_kv` where each rank holds a share of the pools: rows go to their owner."""

from __future__ import annotations

import numpy as np
import torch

from .exchange import RowExchange
from .rows import pool_rows, rows_of
from .sharded_plan import DecodePlan, ShardedPlan


def write_shards(
    exchange: RowExchange,
    plan: ShardedPlan,
    k_local: torch.Tensor,
    v_local: torch.Tensor | None,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
) -> None:
    """Send each new row to the rank that holds its slot, and write those that come."""
    with exchange.agreement("write_kv", plan.terms) as parts:
        rows, pools = _checked(plan, plan.num_local_rows, k_local, v_local, k_shard, v_shard)
        parts += rows
    owners = np.split(plan.batch.owner, np.cumsum(plan.rows_per_rank)[:-1])
    own = owners[exchange.rank]
    rows_for = [torch.from_numpy(np.flatnonzero(own == rank)) for rank in range(exchange.size)]
    rows_from = [int((owner == exchange.rank).sum()) for owner in owners]
    received = exchange.routed_rows("write_kv", parts, rows_for, rows_from)
    _store(plan, pools, received)


def write_own(
    plan: DecodePlan,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
) -> None:
    """Write the new rows that this rank holds, of those that every rank has. Local."""
    rows, pools = _checked(plan, plan.num_tokens, k, v, k_shard, v_shard)
    kept = torch.from_numpy(np.flatnonzero(plan.batch.owner == plan.cp_rank))
    _store(plan, pools, [part.index_select(0, kept) for part in rows])


def _checked(
    plan: ShardedPlan | DecodePlan,
    num_rows: int,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The rows [num_rows, width] and the pools [num_slots, width] of keys and values."""
    if (v is None) != (v_shard is None):
        missing = "v_local" if v is None else "v_shard"
        raise ValueError(
            "ContextParallel.write_kv: v_local and v_shard must be given together, got no "
            f"{missing}"
        )
    slots = _slots(plan)
    rows = [rows_of("write_kv", num_rows, plan.cp_rank, "k_local", k)]
    pools = [pool_rows(plan.page_size, slots, "k_shard", k_shard, k)]
    if v is not None and v_shard is not None:
        rows.append(rows_of("write_kv", num_rows, plan.cp_rank, "v_local", v))
        pools.append(pool_rows(plan.page_size, slots, "v_shard", v_shard, v))
    return rows, pools


def _slots(plan: ShardedPlan | DecodePlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where this rank's pools get rows."""
    return plan.batch.local_slots[plan.batch.owner == plan.cp_rank]


def _store(
    plan: ShardedPlan | DecodePlan, pools: list[torch.Tensor], rows: list[torch.Tensor]
) -> None:
    slots = torch.from_numpy(_slots(plan))
    for pool, new in zip(pools, rows, strict=True):
        pool.index_copy_(0, slots, new)
