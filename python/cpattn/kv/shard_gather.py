# SPDX-License-Identifier: Apache-2.0
"""Plans of page exchanges between ranks of a striped pool before a layer reads prefixes."""

from __future__ import annotations

from .. import _core
from .._core import ShardGatherPlan as ShardGatherPlan
from .._types import IndexTable, Indices
from .placement import PageInterleave

ShardGatherPlan.__module__ = "cpattn.kv"
ShardGatherPlan.__doc__ = """Places of the keys and values of a batch in the scratch of a layer.

`plan_shard_gather` makes it, the same on every rank, once for all layers of a batch. The scratch
has three parts, ``[prefix | chunk | one trash page]``. Every rank sends ``block_pages`` of its
pages; the prefix has the sent pages of all ranks, one rank after the other. The chunk has the new
tokens, which every rank computes. A value: comparable, hashable, picklable, printable.

Attributes
----------
block_pages : int
    Pages that each rank sends; 0 if nothing is gathered.
send_pages : array [shard_size, block_pages], int32, read-only
    Local pages that each rank sends, ascending, filled up with its page 0.
page_pos : array [pages], int32, read-only
    Scratch page of each page of the pool; `trash_page` if it has none.
prefix_pages : array, int32, read-only
    Gathered pages of the pool, by rank, ascending on each rank.
chunk_pages : array, int32, read-only
    Pages of new tokens, in their order from `chunk_page` on.
chunk_page, trash_page : int
    First page of the second and third part of the scratch.
shard_size, page_size, size, max_prefix_tokens, chunk_tokens : int
    Arguments of the plan.

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
    """Plan which cached prefix pages of a batch are gathered, and their places in scratch.

    Attention over a striped pool reads scratch of one layer instead of the pool. All ranks lay it
    out alike, ``[prefix | chunk | one trash page]``. Unique prefix pages stand in the blocks of
    their ranks, by local page; pages of new tokens follow, in the order of requests and positions.
    All other pages, reserved ones too, map to the trash page.

    Parameters
    ----------
    req_to_token : int table [requests, tokens]
        Slots of the tokens of each request, in order. The plan reads the first slot of each page.
    req_pool_indices : ints [bs], or None
        Row of `req_to_token` for each request; None stands for rows 0, 1, ...
    prefix_lens : ints [bs]
        Cached tokens of each request, multiples of the page size. Their pages lie on the ranks in
        turn, as `StripedAllocator` places them, with any first rank.
    seq_lens : ints [bs]
        Tokens of each sequence, the new ones included.
    placement : PageInterleave
        Placement of the pool, over at least two ranks.
    size : int
        Slots of each rank's pool, without its reserved page.
    max_prefix_tokens : int
        Tokens of the first part of the scratch, a multiple of ``shard_size * page_size``. The
        blocks of all ranks must fit: each is as long as the sum over requests of
        ``ceil(pages of the prefix / shard_size)``, even if requests share pages.
    chunk_tokens : int
        Tokens of the second part, a multiple of the page size. Each request begins a page.

    Returns
    -------
    ShardGatherPlan

    Raises
    ------
    TypeError
        If numbers are no integers, or `placement` is no PageInterleave.
    ValueError
        If sizes contradict each other, prefixes are no whole pages or not on the ranks in turn, a
        slot does not begin a page after the reserved ones, new pages occur twice, or the scratch is
        too small.

    Examples
    --------
    Two requests share their first two pages, 2 and 3, and have one more page each:

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
