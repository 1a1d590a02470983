# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.write_kv` over sharded pools: rows go to their owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..plans.sharded_plan import DecodePlan, ShardedPlan, check_rank
from ..transport.exchange import RowExchange
from ..transport.row_bytes import RoutedRows
from .rows import NewRows, new_rows

Heads = slice | list[int]
Routed = tuple[Heads, RoutedRows] | None  # heads on their way; None without new rows


def write_shards(
    exchange: RowExchange,
    plan: ShardedPlan,
    k_local: torch.Tensor,
    v_local: torch.Tensor | None,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
) -> None:
    """Send each new row to the rank that holds its slot, and write the rows that arrive."""
    with exchange.agreement("write_kv", plan.terms) as parts:
        check_rank("write_kv", exchange, plan)
        new = shard_rows("write_kv", plan, (k_local, v_local), (k_shard, v_shard))
        parts += new.rows
    with exchange.without_return():
        send_to_owners("write_kv", exchange, plan, new)


def send_to_owners(call: str, exchange: RowExchange, plan: ShardedPlan, new: NewRows) -> None:
    """Send and write new rows for `write_shards`, once the ranks agree."""
    routes = OwnerRoutes(call, exchange, plan, new)
    routes.store(routes.begin())


class OwnerRoutes:
    """New rows on their way to the ranks that hold their slots: all heads, some, or none."""

    def __init__(
        self,
        call: str,
        exchange: RowExchange,
        plan: ShardedPlan,
        new: NewRows | None,
        num_heads: int = 1,
    ) -> None:
        self._call, self._exchange, self._new = call, exchange, new
        owners = np.split(plan.batch.owner, np.cumsum(plan.rows_per_rank)[:-1])
        own, ranks = owners[exchange.rank], range(exchange.size)
        self._rows_for = [torch.from_numpy(np.flatnonzero(own == rank)) for rank in ranks]
        self._rows_from = [int((owner == exchange.rank).sum()) for owner in owners]
        self._rows = [x.unflatten(1, (num_heads, -1)) for x in (new.rows if new else ())]

    def begin(self, heads: Heads = slice(None)) -> Routed:
        """Send the rows of some heads."""
        if self._new is None:
            return None
        parts = [rows[:, heads].flatten(1) for rows in self._rows]
        routed = self._exchange.begin_routed(self._call, parts, self._rows_for, self._rows_from)
        return heads, routed

    def store(self, begun: Routed) -> None:
        """Write the rows whose slots this rank holds."""
        if begun is None or self._new is None:
            return
        heads, routed = begun
        chosen = [
            received.unflatten(1, (-1, rows.shape[2]))
            for received, rows in zip(self._exchange.routed(routed), self._rows, strict=True)
        ]
        held = self._new.slots[self._new.slots >= 0]
        self._new.store_heads(heads, held, chosen)


def write_own(
    plan: DecodePlan,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor | None,
) -> None:
    """Write the new rows whose slots this rank holds; every rank has all rows. Local."""
    new = shard_rows("write_kv", plan, (k, v), (k_shard, v_shard))
    new.store(new.rows)


def shard_rows(
    call: str,
    plan: ShardedPlan | DecodePlan,
    local: Sequence[torch.Tensor | None],
    shards: Sequence[torch.Tensor | None],
) -> NewRows:
    """Return rows of keys and values, and those of all ranks that this rank's shards receive."""
    return new_rows(
        call, ("k_shard", "v_shard"),
        plan.num_tokens if isinstance(plan, DecodePlan) else plan.num_local_rows, plan.cp_rank,
        plan.page_size, plan.batch.slots_of(plan.cp_rank), local, shards,
    )  # fmt: skip
