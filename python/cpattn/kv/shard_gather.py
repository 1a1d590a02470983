# SPDX-License-Identifier: Apache-2.0
"""Plans of pages that ranks of a striped pool exchange before a layer reads cached prefixes."""

from __future__ import annotations

from .. import _core
from .._core import ShardGatherPlan as ShardGatherPlan
from .._types import IndexTable, Indices
from .placement import PageInterleave

__all__ = ["ShardGatherPlan", "plan_shard_gather"]

ShardGatherPlan.__module__ = "cpattn.kv"
ShardGatherPlan.__doc__ = """Places of the keys and values of a batch in the scratch of a layer.

Made by `plan_shard_gather`, the same on every rank, once for all layers of a batch. The scratch has
three parts, ``[prefix | chunk | one trash page]``. Every rank sends ``block_pages`` of its pages;
what all have sent, one rank after the other, is the prefix. The new tokens, which every rank
computes, are the chunk. A value: it can be compared, hashed, pickled and printed.

Attributes
----------
block_pages : int
    Pages that each rank sends; with 0 nothing is gathered.
send_pages : array [shard_size, block_pages], int32, read-only
    The local pages that each rank sends, ascending, then its page 0 as often as others send more.
page_pos : array [pages], int32, read-only
    The page of the scratch where each page of the pool stands; `trash_page` where it does not.
prefix_pages : array, int32, read-only
    The pages of the pool that are gathered, by rank, ascending on each.
chunk_pages : array, int32, read-only
    Pages of new tokens, in the order in which they stand behind `chunk_page`.
chunk_page, trash_page : int
    Where the second and the third part of the scratch begin.
shard_size, page_size, size, max_prefix_tokens, chunk_tokens : int
    What the plan was made with.

Examples
--------
>>> from cpattn.kv import PageInterleave, plan_shard_gather
>>> placement = PageInterleave(page_size=4, shard_size=2)
>>> slots = [[8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]    # pages 2 to 5
>>> plan = plan_shard_gather(
...     slots, None, [12], [13], placement=placement, size=16, max_prefix_tokens=32,
...     chunk_tokens=16)
>>> plan
ShardGatherPlan(shard_size=2, page_size=4, block_pages=2, 3 prefix pages, 1 chunk pages)
>>> plan.send_pages.tolist()
[[1, 2], [1, 0]]
>>> plan.translate([8, 12, 16, 20, 0]).tolist()    # slot 0 is padding
[0, 8, 4, 32, 48]
>>> plan.write_plan([20], rank=1)    # page 5 is page 2 of rank 1
(array([0]), array([8]))
"""


def plan_shard_gather(
    req_to_token: IndexTable,
    req_pool_indices: Indices | None,
    prefix_lens: Indices,
    seq_lens: Indices,
    *,
    placement: PageInterleave,
    size: int,
    max_prefix_tokens: int,
    chunk_tokens: int,
) -> ShardGatherPlan:
    """Plan what is gathered of the cached prefixes of a batch, and where it stands then.

    Attention over a striped pool reads no pool, but scratch of one layer that all ranks lay out
    alike, ``[prefix | chunk | one trash page]``. Unique pages of prefixes stand in the blocks of
    their ranks, by local page; the pages of new tokens behind, in the order of requests and
    positions. All other pages, reserved ones too, are the trash page.

    Parameters
    ----------
    req_to_token : int table [requests, tokens]
        Slots of the tokens of each request, in their order. Of each page its first slot is read.
    req_pool_indices : ints [bs], or None
        The row of `req_to_token` of each request; None if they are rows 0, 1, ...
    prefix_lens : ints [bs]
        Cached tokens of each request, multiples of the page size. Their pages lie on the ranks in
        turn, as `StripedAllocator` has them, whatever the first one is.
    seq_lens : ints [bs]
        Tokens of each sequence, the new ones included.
    placement : PageInterleave
        Placement of the pool, over at least two ranks.
    size : int
        Slots of each rank's pool, without those of its reserved page.
    max_prefix_tokens : int
        Tokens of the first part of the scratch, a multiple of ``shard_size * page_size``. The
        blocks of all ranks must fit: each is as long as the sum over requests of
        ``ceil(pages of the prefix / shard_size)``, also where requests share pages.
    chunk_tokens : int
        Tokens of the second part, a multiple of the page size. Each request begins a page.

    Returns
    -------
    ShardGatherPlan

    Raises
    ------
    TypeError
        For numbers that are no integers and a placement that is none.
    ValueError
        For sizes that contradict each other, prefixes that are no whole pages, or not on the ranks
        in turn, slots that do not begin a page behind the reserved ones, new pages that occur
        twice, and more pages than the scratch has.

    Examples
    --------
    Two requests that share their first two pages, 2 and 3, and have one more each:

    >>> from cpattn.kv import PageInterleave, StripedAllocator, plan_shard_gather
    >>> allocator = StripedAllocator(16, page_size=4, shard_size=2)
    >>> shared, one, two = (
    ...     allocator.alloc_extend([prefix], [end], [0]).tolist()
    ...     for prefix, end in [(0, 8), (8, 10), (8, 11)])
    >>> plan = plan_shard_gather(
    ...     [shared + one + [-1], shared + two], None, [8, 8], [10, 11],
    ...     placement=PageInterleave(shard_size=2, page_size=4), size=16, max_prefix_tokens=16,
    ...     chunk_tokens=8)
    >>> plan.block_pages, plan.prefix_pages.tolist(), plan.chunk_pages.tolist()
    (2, [2, 3], [4, 6])
    """
    if not isinstance(placement, PageInterleave):
        raise TypeError(
            f"plan_shard_gather: placement must be of type PageInterleave, "
            f"got {type(placement).__name__}"
        )
    return _core.plan_shard_gather(
        req_to_token, req_pool_indices, prefix_lens, seq_lens, placement._interleave, size,
        max_prefix_tokens, chunk_tokens,
    )  # fmt: skip
