# SPDX-License-Identifier: Apache-2.0
"""Checks and counts that all placements and exchanges of one batch share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from cpattn._limits import check_integer, check_kind
from cpattn.context_parallel.exchanges import EXCHANGES, ON_ALL_RANKS, PLACEMENTS
from cpattn.context_parallel.metadata import ContextParallelMetadata, build_cp_metadata_all_ranks
from cpattn.context_parallel.placement_name import PlacementName

from .layer import ITEM_BYTES, AttentionLayer, Ints
from .placement import Shards, pairs_by_owner, shards, stripes
from .work import RankWork, checked_batch, work_of_plans

Mesh = tuple[int, int]  # rows on a ring, and ranks of a row, which split the heads


def check_placing(
    function: str,
    placement: str,
    exchange: str,
    cp_size: int,
    ranks_per_host: int,
    state_dtype: str,
    exchanges: Sequence[str] = ON_ALL_RANKS,
) -> None:
    """Raise ValueError unless placement and exchange of keys are possible."""
    parsed = PlacementName.parse(placement) if isinstance(placement, str) else None
    for name, value, known in (
        ("placement", parsed.kind if parsed else placement, tuple(PLACEMENTS)),
        ("exchange", exchange, exchanges),
        ("state_dtype", state_dtype, tuple(ITEM_BYTES)),
    ):
        if value not in known:
            raise ValueError(f"{function}: {name} must be one of {', '.join(known)}, got {value!r}")
    check_integer(function, "cp_size", cp_size)
    check_integer(function, "ranks_per_host", ranks_per_host)
    if cp_size % ranks_per_host:
        raise ValueError(
            f"{function}: cp_size must be a multiple of ranks_per_host = {ranks_per_host}, "
            f"got {cp_size}"
        )
    if placement == "replicated" and exchange in EXCHANGES and EXCHANGES[exchange].needs_shards:
        raise ValueError(
            f"{function}: exchange must be {', '.join(possible_exchanges(placement))} where "
            f"placement is replicated, as every pool takes all keys, got {exchange!r}"
        )


def check_mesh(
    function: str,
    placement: str,
    exchange: str,
    cp_size: int,
    ranks_per_host: int,
    mesh: Sequence[int] | None,
) -> Mesh | None:
    """Return the mesh as two numbers; ValueError unless ranks can exchange in it."""
    if mesh is None:
        if exchange == "usp":
            raise ValueError(f"{function}: mesh must be given where exchange is usp, got None")
        return None
    if len(mesh) != 2:
        raise ValueError(f"{function}: mesh must be (ring, heads), two numbers, got {mesh!r:.60}")
    for size in mesh:
        check_integer(function, "mesh", size)
    ring, heads = mesh
    if ring * heads != cp_size:
        raise ValueError(
            f"{function}: mesh must have the {cp_size} ranks of cp_size, got {ring} x {heads}"
        )
    if placement == "replicated" or ranks_per_host > 1:
        raise ValueError(
            f"{function}: mesh must be of shared out pools and one rank for each host, got "
            f"{placement} and {ranks_per_host} ranks_per_host"
        )
    return ring, heads


def possible_exchanges(placement: str, mesh: Mesh | None = None) -> tuple[str, ...]:
    """Return the exchanges that a placement allows, including "usp" with a mesh."""
    return tuple(
        name
        for name, exchange in EXCHANGES.items()
        if (placement != "replicated" or not exchange.needs_shards)
        and (mesh is not None or not exchange.needs_mesh)
    )


class BatchCounts:
    """Counts of one batch for all exchanges, each made on demand."""

    def __init__(
        self,
        extend_lens: Any,
        seq_lens: Any,
        *,
        cp_size: int,
        strategy: str,
        layer: AttentionLayer,
        placement: str,
        ranks_per_host: int,
        function: str = "exchange_work",
    ) -> None:
        check_kind(function, "layer", layer, AttentionLayer)
        extends, lengths = checked_batch(function, extend_lens, seq_lens)
        self.plans: Sequence[ContextParallelMetadata] = build_cp_metadata_all_ranks(
            extends, lengths, cp_size=cp_size, strategy=strategy
        )
        self.extends, self.seq_lens = extends, lengths
        self.cp_size, self.layer, self.placement = cp_size, layer, placement
        self.ranks_per_host, self.num_hosts = ranks_per_host, cp_size // ranks_per_host

    @property
    def sharded(self) -> bool:
        return self.placement != "replicated"

    @cached_property
    def own(self) -> RankWork:
        """Work of ranks that attend with their own tokens to all keys, at once or by shares."""
        return work_of_plans(self.plans, self.layer)

    @cached_property
    def alone(self) -> RankWork:
        """Work of one rank that attends with all tokens to all keys, at once or by shares."""
        return work_of_plans(self._plan_alone, self.layer)

    def alone_with(self, num_heads: int, num_kv_heads: int) -> RankWork:
        """Return this work with only some heads, which gives items with fewer rows."""
        layer = replace(self.layer, num_heads=num_heads, num_kv_heads=num_kv_heads)
        return work_of_plans(self._plan_alone, layer)

    @cached_property
    def _plan_alone(self) -> list[ContextParallelMetadata]:
        return build_cp_metadata_all_ranks(
            self.extends, self.seq_lens, cp_size=1, strategy="contiguous"
        )

    @cached_property
    def owner_pairs(self) -> Ints:
        """Pairs [cp_size] of all new tokens and the keys of each rank."""
        laid = stripes(self.placement, self.seq_lens, self.cp_size, self.layer.page_size)
        return pairs_by_owner(self.extends, self.seq_lens, self.layer, laid).sum(1)

    @cached_property
    def shards(self) -> Shards:
        if not self.sharded:  # ranks send what they compute, and no row travels only for pools
            own = self.own.tokens
            return Shards(own, 0 * own, own, own)
        laid = stripes(self.placement, self.seq_lens, self.cp_size, self.layer.page_size)
        return shards(
            self.plans, self.extends, self.seq_lens, self.layer, laid, self.ranks_per_host
        )

    def by_host(self, values: Ints) -> Ints:
        """Return [cp_size] as [num_hosts, ranks_per_host]; the ranks of a column exchange rows."""
        return values.reshape(self.num_hosts, self.ranks_per_host)
