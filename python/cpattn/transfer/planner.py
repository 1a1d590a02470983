# SPDX-License-Identifier: Apache-2.0
"""Plans from two layouts: buffers are paired by what they hold, never by their position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .. import _core
from .._arguments import items
from .._types import Indices
from ..profiling.calls import announced
from .layout import KVLayout
from .plan import TransferPlan, cells, rows_of, table

__all__ = ["KVLink", "KVLinks", "plan_kv_links", "plan_kv_transfer"]


@announced("plan_kv_transfer")
def plan_kv_transfer(
    src: KVLayout,
    dst: KVLayout,
    src_pages: Indices,
    dst_pages: Indices,
    *,
    num_tokens: int | None = None,
    first_token: int | None = None,
    src_start: int = 0,
    dst_start: int = 0,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_share: str = "pages",
) -> TransferPlan:
    """Plan what a source has to write into a destination, for tokens of one sequence.

    Buffers are paired by layer, kind and draft flag. Target layers that both sides answer for
    (`KVLayout.layers`) must have the same kinds on both; others belong to other links. Draft
    layers are sent if both sides have any, and must then be the same on both. Of K and V, and of
    their scales, the heads that both have are sent; of ranks with the same heads, number
    ``dst.tp_rank % replicas`` sends. Nothing is sent for entries that either side left out.

    Parameters
    ----------
    src, dst : KVLayout
        The buffers of this process, and those of the peer.
    src_pages, dst_pages : ints [pages]
        The pages of the sequence, in its order; where ranks stripe pages, those of the group, of
        which the plan has what both sides hold. Page sizes may differ.
    num_tokens : int, optional
        How many are sent; default: to the end of both lists, which then must be the same.
    first_token : int, optional
        The first one, earlier ones being there already; default: the first of both lists.
    src_start, dst_start : int
        The token with which each list begins, the first of a page. Tokens are numbered in the
        sequence, also for a destination that keeps those of its DCP rank only.
    cp_rank, cp_size : int
        Of a context-parallel group of senders that all have all KV.
    cp_share : str
        What these divide evenly: "pages" (of both sides, so whole ones) or "layers".

    Returns
    -------
    TransferPlan
        Buffers in the order of `src`, and for each the least number of blocks, ascending in the
        destination. Empty if the two have nothing to do with each other.

        Whole pages, also the last one, where both sides have pages of one size, with the same
        heads in one order, and the tokens begin at a page; otherwise exactly the rows of these
        tokens, head by head where a side has heads first.

    Raises
    ------
    TypeError
        If a layout is no KVLayout, or a page or a number no integer.
    ValueError
        A missing buffer, different dtypes or bytes for each token and head, tokens that a list does
        not hold, a page outside its buffer, a page of the destination that occurs twice,
        destination buffers that overlap, part of a page that is not made of rows. Names side,
        kind, layer and lengths.

    Examples
    --------
    >>> from cpattn.transfer import KVEntry, KVLayout, plan_kv_transfer
    >>> def layout(addr):
    ...     return KVLayout([KVEntry(0, "k", False, addr, 4608, 512)], page_size=8)
    >>> plan = plan_kv_transfer(layout(4096), layout(1 << 20), [2, 3, 7], [4, 5, 1])
    >>> plan.lengths.tolist(), (plan.src_addrs - 4096).tolist()
    ([512, 1024], [3584, 1024])
    """
    return _core.plan_kv_transfer(
        src,
        dst,
        src_pages,
        dst_pages,
        num_tokens=num_tokens,
        first_token=first_token,
        src_start=src_start,
        dst_start=dst_start,
        cp_rank=cp_rank,
        cp_size=cp_size,
        cp_share=cp_share,
    )


class KVLink(NamedTuple):
    """The plan of one source and one destination.

    Attributes
    ----------
    source, destination : int
        Positions in the lists that `plan_kv_links` was given.
    plan : TransferPlan
        What the source writes into the destination.

    Examples
    --------
    >>> from cpattn.transfer import KVEntry, KVLayout, plan_kv_links
    >>> layout = [KVLayout([KVEntry(0, "k", False, addr, 1024, 512)], 8) for addr in (4096, 8192)]
    >>> ((source, destination, plan),) = plan_kv_links(layout[:1], layout[1:], [[0]], [[1]])
    >>> source, destination, plan
    (0, 0, TransferPlan(1 blocks, 512 bytes, 1 × k))
    """

    source: int
    destination: int
    plan: TransferPlan


class KVLinks(tuple[KVLink, ...]):
    """All links of a transfer, a tuple of `KVLink` by source; prints as a table.

    Examples
    --------
    >>> from cpattn.transfer import KVEntry, KVLayout, plan_kv_links
    >>> layout = [KVLayout([KVEntry(0, "k", False, addr, 1024, 512)], 8) for addr in (4096, 8192)]
    >>> links = plan_kv_links(layout[:1], layout[1:], [[0]], [[1]])
    >>> len(links), links.total_bytes
    (1, 512)
    >>> print(links)
    link    buffers  blocks  bytes  mean block
    0 -> 0    1 × k       1  512 B       512 B
    total                 1  512 B       512 B
    """

    __slots__ = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all plans."""

        return sum(link.plan.total_bytes for link in self)

    def summary(self) -> str:
        """Format a line for each link and one for all: buffers, blocks, bytes, the mean block."""
        rows = []
        for source, destination, plan in self:
            parts = ", ".join(f"{layers} × {name}" for name, layers, *_ in rows_of(plan))
            sums = cells(len(plan), plan.total_bytes)
            rows.append((f"{source} -> {destination}", parts, *sums))
        sums = cells(sum(len(link.plan) for link in self), self.total_bytes)
        header = ("link", "buffers", "blocks", "bytes", "mean block")
        return table(header, [*rows, ("total", "", *sums)])

    __str__ = summary


KVLink.__module__ = KVLinks.__module__ = "cpattn.transfer"


@announced("plan_kv_links")
def plan_kv_links(
    sources: Sequence[KVLayout],
    destinations: Sequence[KVLayout],
    src_pages: Sequence[Indices],
    dst_pages: Sequence[Indices],
    *,
    num_tokens: int | None = None,
    first_token: int | None = None,
    src_start: int = 0,
    dst_start: int = 0,
    cp_ranks: Indices | None = None,
    cp_size: int = 1,
    cp_share: str = "pages",
) -> KVLinks:
    """Plan all links between two groups of servers, which together are complete.

    Every head and token of every buffer of every destination is written by exactly one source,
    draft buffers where any source has some; and every target layer of a source is received.

    Parameters
    ----------
    sources, destinations : sequences of KVLayout
        Of every process: pipeline stages, TP ranks, CP ranks, ranks that stripe pages or divide
        layers; and at the destination DCP ranks.
    src_pages, dst_pages : sequences of ints, one for each process
        As of `plan_kv_transfer`.
    num_tokens, first_token, src_start, dst_start, cp_size, cp_share
        As of `plan_kv_transfer`, the same for all.
    cp_ranks : ints, one for each source, optional
        Its rank in its context-parallel group; needed with ``cp_size > 1``.

    Returns
    -------
    KVLinks
        A tuple of ``(source, destination, plan)`` without those that send nothing.

    Raises
    ------
    TypeError
        If a layout is no KVLayout, or a page or a number no integer.
    ValueError
        What nobody or more than one source sends, with layer, heads and tokens; and whatever
        `plan_kv_transfer` refuses, with the link.

    Examples
    --------
    Two ranks with a head each send to one that has both:

    >>> from cpattn.transfer import KVEntry, KVLayout, plan_kv_links
    >>> ranks = [
    ...     KVLayout([KVEntry(0, "k", False, 4096 + 1024 * rank, 1024, 512)], page_size=8,
    ...              tp_rank=rank, tp_size=2, total_kv_heads=2)
    ...     for rank in range(2)
    ... ]
    >>> whole = KVLayout([KVEntry(0, "k", False, 8192, 2048, 1024)], page_size=8, total_kv_heads=2)
    >>> links = plan_kv_links(ranks, [whole], [[0], [1]], [[1]])
    >>> [(link.source, link.destination, link.plan.total_bytes) for link in links]
    [(0, 0, 512), (1, 0, 512)]
    """
    function = "plan_kv_links"
    peers = items(sources, function, "sources")
    if cp_ranks is None:
        if _core.integer(cp_size, function, "cp_size") != 1:
            raise ValueError(f"{function}: cp_ranks must be given with cp_size {cp_size}")
        cp_ranks = [0] * len(peers)
    links = _core.plan_kv_links(
        peers,  # which no other thread can change while the plans are made
        items(destinations, function, "destinations"),
        items(src_pages, function, "src_pages"),
        items(dst_pages, function, "dst_pages"),
        cp_ranks,
        num_tokens=num_tokens,
        first_token=first_token,
        src_start=src_start,
        dst_start=dst_start,
        cp_size=cp_size,
        cp_share=cp_share,
    )
    return KVLinks(KVLink(*link) for link in links)
