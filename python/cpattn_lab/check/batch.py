# SPDX-License-Identifier: Apache-2.0
"""Batches of `cpattn_lab.check`, for every way to compute a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cpattn import reference
from cpattn.context_parallel.exchanges import EXCHANGES, ON_ALL_RANKS
from cpattn.distributed.context_parallel import ContextParallel
from cpattn.distributed.plans.plan import ContextParallelPlan
from cpattn.doctor.roundings import error_in_units
from cpattn.kv import PageInterleave, TokenInterleave

STRATEGIES = ("zigzag", "interleave", "contiguous")
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
PLACEMENTS: dict[str, Callable[[int], Any]] = {
    "page_interleave": lambda size: PageInterleave(shard_size=size, page_size=PAGE),
    "token_interleave": lambda size: TokenInterleave(shard_size=size, interleave=1),
}


@dataclass(frozen=True)
class Way:
    """Way to compute a layer; without an exchange, on replicated pools."""

    strategy: str = "zigzag"
    placement: str = "page_interleave"
    exchange: str | None = None
    one_call: bool = False  # writes new rows and attends

    def __str__(self) -> str:
        if self.exchange:
            return f"{self.exchange} over {self.placement}"
        return f"{self.strategy}, in one call" if self.one_call else self.strategy


def all_ways() -> Iterator[Way]:
    """Return every strategy, then every placement with every exchange."""
    yield from (Way(strategy) for strategy in STRATEGIES)
    yield Way(one_call=True)
    for placement in PLACEMENTS:
        for exchange in ON_ALL_RANKS:
            yield Way(placement=placement, exchange=exchange, one_call=True)


class CheckBatch:
    """Batch with the same random inputs on all ranks; this rank's pools hold the prefixes.

    k and v are the correct whole pools, k_cache and v_cache the pools of this rank, a share of them
    if there is an exchange.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        way: Way,
        extends: np.ndarray[Any, Any],
        prefixes: np.ndarray[Any, Any],
        dtype: str,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        placement = PLACEMENTS[way.placement](dist.get_world_size(group))
        self.way = way
        self.cp = ContextParallel(
            group,
            strategy=way.strategy,
            page_size=PAGE,
            placement=placement if way.exchange else None,
            exchange=way.exchange or "auto",
        )
        pages = -(-(extends + prefixes) // PAGE)
        order = torch.randperm(int(pages.sum()), generator=generator).numpy()
        self.tables = np.full((len(extends), pages.max()), -1, np.int32)
        self.tables[np.arange(pages.max()) < pages[:, None]] = order
        self.plan: ContextParallelPlan = self.cp.plan(
            extends, extends + prefixes, block_tables=self.tables
        )
        kind = getattr(torch, dtype)
        shape = (len(order), PAGE, KV_HEADS, DIM)
        self.q = torch.randn(int(extends.sum()), HEADS, DIM, generator=generator).to(kind)
        self.k, self.v = (torch.randn(shape, generator=generator).to(kind) for _ in "kv")
        slots = torch.tensor(self.plan.slots)
        new = [x.flatten(0, 1)[slots] for x in (self.k, self.v)]
        self.k_cache, self.v_cache = (x.flatten(0, 1).clone() for x in (self.k, self.v))
        for cache in (self.k_cache, self.v_cache):
            cache[slots] = torch.nan
        if way.exchange:
            num_rows = -(-len(order) // placement.shard_size) * PAGE
            held = torch.from_numpy(placement.global_index(self.cp.cp_rank, np.arange(num_rows)))
            held = held.clamp(max=len(self.k_cache) - 1)  # no rank's share is short
            self.k_cache, self.v_cache = self.k_cache[held], self.v_cache[held]
        self._rows = [self.cp.shard(self.plan, x) for x in new]
        self._q = self.cp.shard(self.plan, self.q)

    def write_kv(self) -> None:
        """Write the new rows of all ranks into the pools."""
        k, v = self._rows
        self.cp.write_kv(self.plan, k, v, self.k_cache, self.v_cache)

    def attend(self) -> torch.Tensor:
        """Attend with this rank's rows, after new rows are written."""
        out: torch.Tensor = self.cp.attend(self.plan, self._q, self.k_cache, self.v_cache)
        return out

    def layer(self) -> torch.Tensor:
        """Write new rows, then attend."""
        if not self.way.one_call:
            self.write_kv()
            return self.attend()
        k, v = self._rows
        out: torch.Tensor = self.cp.attend(
            self.plan, self._q, self.k_cache, self.v_cache, k_local=k, v_local=v
        )
        return out


def largest_error(group: dist.ProcessGroup, way: Way, dtype: str) -> float:
    """Return the error on a small ragged batch, in units of a rounding; a merge adds another."""
    size = dist.get_world_size(group)
    extends = np.array([2 * size + 5, 1, 7 * size + 3, 0, 3])
    prefixes = np.array([0, 40, 19, 8, PAGE])
    batch = CheckBatch(group, way, extends, prefixes, dtype)
    gathered = batch.cp.gather(batch.plan, batch.layer())
    sequences: dict[str, Any] = {
        "q_lens": extends,
        "kv_lens": extends + prefixes,
        "block_tables": batch.tables,
    }
    expected, _ = reference.paged_attention(batch.q, batch.k, batch.v, **sequences)
    magnitude, _ = reference.paged_attention(batch.q, batch.k, batch.v.abs(), **sequences)
    error = error_in_units(gathered.double().numpy(), expected, magnitude, dtype)
    # Partial results are rounded, and so is their merge.
    twice = way.exchange is not None and EXCHANGES[way.exchange].rounds_twice
    return error / 2 if twice else error
