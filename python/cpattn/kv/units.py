# SPDX-License-Identifier: Apache-2.0
"""Plans that send compressed units from the ranks that compute them to the ranks that keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core
from ..context_parallel import halo
from .placement import PageInterleave, TokenInterleave

if TYPE_CHECKING:
    from .._types import IndexTable
    from ..context_parallel.metadata import ContextParallelMetadata
    from ..context_parallel.vllm_0_32 import PCPLayout


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

    A unit compresses `ratio` tokens into one row of a pool. Units of a request have positions like
    tokens: `block_tables` gives the slot of unit u, and `placement` the rank that keeps it.
    `plan_halo` gives the rank that computes it.

    Parameters
    ----------
    metadata : ContextParallelMetadata or PCPLayout
        Tokens of the batch, as for `plan_halo`; units that end in padding need slots, too.
    ratio : int
        Tokens from one unit to the next, at least 1.
    block_tables : int table [bs, pages]
        Pages of each request in the pools of units. Tables of the tokens serve if a page of tokens
        has `ratio` times as many slots as a page of units.
    page_size : int
        Units per page.
    placement : TokenInterleave or PageInterleave, optional
        Placement of units on ranks; default: each rank keeps every unit. With a `TokenInterleave`,
        ranks keep runs of ``interleave`` units in turn, and tables list the pages of this rank's
        units. To keep units with their tokens, take the tokens' ``interleave`` / `ratio`. With a
        `PageInterleave`, tables list pages of the pools of all ranks together.
    rank : int, optional
        This rank, if `metadata` is a PCPLayout.

    Returns
    -------
    cpattn.context_parallel.halo.RelayoutPlan
        ``send_indices`` count this rank's units in the order of its `HaloPlan`; ``recv_indices``
        are slots of its pool. Units that all ranks compute are not sent.

    Raises
    ------
    TypeError
        If `metadata` or `placement` has another type, or a number is no integer.
    ValueError
        If `ratio` or `page_size` is below 1 or beyond int32, `placement` is for another number of
        ranks or page size, or a table lacks the page of a unit that this rank keeps (with a
        `PageInterleave`: of any new unit).

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
