# SPDX-License-Identifier: Apache-2.0
"""New rows in pools that a host's ranks share: one rank writes each row, and it travels once.

A rank writes the rows that it computes and those of its `Rails`; all hosts write the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ... import _core
from ..plans.plan import ContextParallelPlan
from ..transport.exchange import RowExchange
from ..transport.host import HostGroup
from ..transport.roll_call import Host
from ..transport.row_bytes import ArrivingRows
from .rows import NewRows, put_rows


def shared_digest(
    host: Host | None, call: str, k_cache: torch.Tensor, v_cache: torch.Tensor | None
) -> int:
    """Digest the places of the caches in shared memory, or return 0 if they are not shared."""
    caches = {"k_cache": k_cache} | ({} if v_cache is None else {"v_cache": v_cache})
    return host.digest_of(call, caches) if isinstance(host, HostGroup) else 0


class SharedRows:
    """New rows of one call, and the places where this rank writes them.

    Some KV heads go at a time: `begin` sends those of this rank to other hosts; `finish` writes
    those that arrive and waits until all ranks of the host have done so.
    """

    def __init__(
        self,
        call: str,
        exchange: RowExchange,
        host: Host,
        plan: ContextParallelPlan,
        new: NewRows,
    ) -> None:
        self._call, self._exchange, self._rails = call, exchange, host.rails
        self._plan, self._new = plan, new

    def write_own(self) -> None:
        """Write the rows that this rank has computed, in all heads."""
        slots = self._plan.own_slots
        if len(slots):
            put_rows(self._new.pools, slots, self._new.rows)

    def begin(self, rows: Sequence[torch.Tensor], buffer: int = 0) -> ArrivingRows | None:
        """Begin to exchange rows [num_local_rows, width], as `RowExchange.begin_rows`.

        The result is None if there is no other host.
        """
        if not self._rails.others:
            return None
        counts = self._plan.rows_per_rank
        return self._exchange.begin_rows(self._call, counts, rows, buffer, self._rails)

    def finish(self, arriving: ArrivingRows | None, heads: slice | None = None) -> None:
        """Write the rows of `begin` in these KV heads, and wait for the other ranks here."""
        with _core.TraceSpan(_core.TraceScope.gather):
            if arriving is not None:
                self._write(self._exchange.arrived(arriving), heads)
            self._exchange.meet_host(self._call)

    def _write(self, gathered: Sequence[torch.Tensor], heads: slice | None) -> None:
        counts = self._rails.kept_counts(self._plan.rows_per_rank)
        ends = list(accumulate(counts))
        for source in self._rails.sources:
            slots = self._plan.slots_by_rank[source]
            rows = [x[ends[source] - counts[source] : ends[source]] for x in gathered]
            if heads is None:
                put_rows(self._new.pools, slots, rows)
            else:
                by_heads = [x.unflatten(1, (heads.stop - heads.start, -1)) for x in rows]
                self._new.store_heads(heads, slots, by_heads)
