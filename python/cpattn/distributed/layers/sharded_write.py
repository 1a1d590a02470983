# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.write_kv` where each rank holds a share of the pools: rows go to their owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..plans.sharded_plan import DecodePlan, ShardedPlan
from ..transport.exchange import RowExchange
from .rows import NewRows, new_rows, put_rows


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
        new = shard_rows("write_kv", plan, (k_local, v_local), (k_shard, v_shard))
        parts += new.rows
    with exchange.without_return():
        send_to_owners("write_kv", exchange, plan, new)


def send_to_owners(call: str, exchange: RowExchange, plan: ShardedPlan, new: NewRows) -> None:
    """What `write_shards` does, once the ranks agree."""
    owners = np.split(plan.batch.owner, np.cumsum(plan.rows_per_rank)[:-1])
    own = owners[exchange.rank]
    rows_for = [torch.from_numpy(np.flatnonzero(own == rank)) for rank in range(exchange.size)]
    rows_from = [int((owner == exchange.rank).sum()) for owner in owners]
    received = exchange.routed_rows(call, new.rows, rows_for, rows_from)
    for pool, rows in zip(new.pools, received, strict=True):
        put_rows(pool, new.slots, rows)


def write_own(
    plan: DecodePlan,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
) -> None:
    """Write the new rows that this rank holds, of those that every rank has. Local."""
    new = shard_rows("write_kv", plan, (k, v), (k_shard, v_shard))
    new.store(new.rows)


def shard_rows(
    call: str,
    plan: ShardedPlan | DecodePlan,
    local: Sequence[torch.Tensor | None],
    shards: Sequence[torch.Tensor | None],
) -> NewRows:
    """Rows of keys and values, and what this rank's shards get of those of all ranks."""
    held = np.flatnonzero(plan.batch.owner == plan.cp_rank)
    return new_rows(
        call,
        ("k_shard", "v_shard"),
        plan.num_tokens if isinstance(plan, DecodePlan) else plan.num_local_rows,
        plan.cp_rank,
        plan.page_size,
        plan.batch.local_slots[held],
        torch.from_numpy(held),
        local,
        shards,
    )
