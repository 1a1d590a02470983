# SPDX-License-Identifier: Apache-2.0
"""Plans of compressed units: from the ranks that compute them to those whose pools keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core
from ..context_parallel import halo
from .placement import PageInterleave, TokenInterleave

if TYPE_CHECKING:
    from .._types import IndexTable
    from ..context_parallel.metadata import ContextParallelMetadata
    from ..context_parallel.vllm_0_32 import PCPLayout

__all__ = ["plan_units"]


def plan_units(
    metadata: ContextParallelMetadata | PCPLayout,
    *,
    ratio: int,
    block_tables: IndexTable,
    page_size: int,
    placement: TokenInterleave | PageInterleave | None = None,
    rank: int | None = None,
) -> halo.RelayoutPlan:
    """Plan how compressed units go to the ranks that keep them, and into which slots.

    A unit of `ratio` tokens is a row of a pool, and stands in the sequence of units of its request
    as a token does in that of tokens: unit u has the slot that `block_tables` names for it, and
    `placement` says which rank keeps it. `plan_halo` says which rank computes it.

    Parameters
    ----------
    metadata : ContextParallelMetadata or PCPLayout
        As of `plan_halo`; units that end in padding need slots, too.
    ratio : int
        Tokens from one unit to the next, at least 1.
    block_tables : int table [bs, pages]
        Pages of each request in pools of units: the tables of the tokens, where a page has
        1 / `ratio` as many units as tokens.
    page_size : int
        Units of a page.
    placement : TokenInterleave or PageInterleave, optional
        Of units, over all ranks; default: each rank keeps every unit. By a `TokenInterleave` ranks
        keep runs of ``interleave`` units in turn, 1 / `ratio` of that of the tokens where these are
        kept with their units, and tables have the pages of those that this rank keeps. By a
        `PageInterleave` tables have pages of the pools of all ranks together.
    rank : int, optional
        This rank, where `metadata` is a layout.

    Returns
    -------
    cpattn.context_parallel.halo.RelayoutPlan
        ``send_indices`` count the units of the rank as its `HaloPlan` lists them;
        ``recv_indices`` are slots of its pool. Units that all ranks compute are not sent.

    Raises
    ------
    TypeError
        If `metadata` or `placement` is none, or a number is no integer.
    ValueError
        For a `ratio` or `page_size` below 1 or beyond int32, a placement over other ranks or pages,
        and tables that lack a page of a unit that the rank keeps, or, with a `PageInterleave`, of
        any new unit.

    Examples
    --------
    Rank 0 computes unit 0, rank 1 units 1 and 2. Units go to ranks in turn:

    >>> import cpattn
    >>> from cpattn.kv import TokenInterleave, plan_units
    >>> ranks = cpattn.build_cp_metadata_all_ranks([12], cp_size=2, strategy="contiguous")
    >>> pools = {"block_tables": [[3]], "page_size": 2}
    >>> placement = TokenInterleave(shard_size=2, interleave=1)
    >>> plan = plan_units(ranks[1], ratio=4, placement=placement, **pools)
    >>> plan.send_counts, plan.send_indices, plan.recv_counts, plan.recv_indices
    ([1, 1], array([1, 0]), [0, 1], array([6]))
    """
    if placement is not None and not isinstance(placement, (TokenInterleave, PageInterleave)):
        raise TypeError(
            "plan_units: placement must be of type TokenInterleave or PageInterleave, or None, "
            f"got {type(placement).__name__}"
        )
    interleave = None if placement is None else placement._interleave
    of_slots = isinstance(placement, PageInterleave)
    return halo.RelayoutPlan(
        *_core.plan_units(metadata, ratio, block_tables, page_size, interleave, of_slots, rank)
    )
