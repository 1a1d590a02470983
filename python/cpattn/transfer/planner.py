# SPDX-License-Identifier: Apache-2.0
"""Plans from two layouts: buffers pair by their contents, never by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .. import _core
from .._arguments import items
from .._types import Indices
from ..profiling.calls import announced
from .layout import KVLayout
from .plan import TransferPlan, cells, rows_of, table


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
    """Plan the writes of a source into a destination, for tokens of one sequence.

    Buffers pair by layer, kind and draft flag. Target layers that both sides answer for
    (`KVLayout.layers`) must have the same kinds on both; other layers belong to other links. Draft
    layers are sent if both sides have any, and must then be the same on both. Of K and V, and of
    their scales, the plan sends the heads that both sides have; among ranks with the same heads,
    number ``dst.tp_rank % replicas`` sends. Entries that either side left out are skipped.

    Parameters
    ----------
    src, dst : KVLayout
        Buffers of this process, and of the peer.
    src_pages, dst_pages : ints [pages]
        Pages of the sequence, in its order. If ranks stripe pages, pages of the group; the plan
        takes the pages that both sides hold. Page sizes may differ.
    num_tokens : int, optional
        Number of tokens to send. Default: to the end of both lists, which then must be the same.
    first_token : int, optional
        First token to send, if earlier ones are there already. Default: the first of both lists.
    src_start, dst_start : int
        Token at which the first page of each list begins. Token numbers count in the sequence, even
        for a destination that keeps only the tokens of its DCP rank.
    cp_rank, cp_size : int
        Rank and size of a context-parallel group of senders that all have all KV.
    cp_share : str
        Unit that these senders divide evenly: "pages" (whole pages of both sides) or "layers".

    Returns
    -------
    TransferPlan
        Buffers in the order of `src`, each with the fewest possible blocks, ascending in the
        destination. Empty if the sides have no layer, head or token in common.

        Blocks are whole pages, including the last one, if both sides have the same page size and
        the same heads in one order, and the tokens begin at a page. Otherwise blocks are exactly
        the rows of the tokens, head by head if a side has heads first.

    Raises
    ------
    TypeError
        If a layout is no KVLayout, or a page or number is no integer.
    ValueError
        If a buffer is missing, dtypes or bytes per token and head differ, a list lacks tokens, a
        page is outside its buffer, a page of the destination occurs twice, destination buffers
        overlap, or a partial page is not made of rows. Names side, kind, layer and lengths.

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
        src, dst, src_pages, dst_pages, num_tokens=num_tokens, first_token=first_token,
        src_start=src_start, dst_start=dst_start, cp_rank=cp_rank, cp_size=cp_size,
        cp_share=cp_share,
    )  # fmt: skip


class KVLink(NamedTuple):
    """Plan of one source and one destination.

    Attributes
    ----------
    source, destination : int
        Positions in the lists of `plan_kv_links`.
    plan : TransferPlan
        Blocks that the source writes into the destination.

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
        """Total bytes of all plans."""
        return sum(link.plan.total_bytes for link in self)

    def summary(self) -> str:
        """Format a line for each link and a total: buffers, blocks, bytes, the mean block."""
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
    """Plan all links between two groups of servers, and check that they are complete.

    Exactly one source writes each head and token of each buffer of each destination (draft buffers
    if any source has some), and some destination receives every target layer of a source.

    Parameters
    ----------
    sources, destinations : sequences of KVLayout
        Layouts of all processes: pipeline stages, TP ranks, CP ranks, ranks that stripe pages or
        divide layers; at the destination also DCP ranks.
    src_pages, dst_pages : sequences of ints, one for each process
        See `plan_kv_transfer`.
    num_tokens, first_token, src_start, dst_start, cp_size, cp_share
        See `plan_kv_transfer`, the same for all.
    cp_ranks : ints, one for each source, optional
        Context-parallel rank of each source; required with ``cp_size > 1``.

    Returns
    -------
    KVLinks
        Tuple of ``(source, destination, plan)`` without empty plans.

    Raises
    ------
    TypeError
        If a layout is no KVLayout, or a page or number is no integer.
    ValueError
        If no source or several sources send the same data (names layer, heads and tokens), or if
        `plan_kv_transfer` refuses a link (names the link).

    Examples
    --------
    Two ranks with one head each send to a rank that has both:

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
    # `items` makes copies, which no other thread can change while the plans are made.
    links = _core.plan_kv_links(
        peers, items(destinations, function, "destinations"),
        items(src_pages, function, "src_pages"), items(dst_pages, function, "dst_pages"), cp_ranks,
        num_tokens=num_tokens, first_token=first_token, src_start=src_start, dst_start=dst_start,
        cp_size=cp_size, cp_share=cp_share,
    )  # fmt: skip
    return KVLinks(KVLink(*link) for link in links)
