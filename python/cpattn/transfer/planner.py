# SPDX-License-Identifier: Apache-2.0
"""Plans from two layouts: buffers are paired by what they hold, never by their position."""

from __future__ import annotations

from .. import _core
from ..topk import Indices
from .layout import KVLayout
from .plan import TransferPlan

__all__ = ["plan_kv_transfer"]


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
    """What a source has to write into a destination, for tokens of one sequence.

    Buffers are paired by layer, kind and draft flag. Target layers that both sides answer for
    (`KVLayout.layers`) must have the same kinds on both; others belong to other links. Draft
    layers are sent if both sides have any, and must then be the same on both. Of K and V the
    heads that both have are sent; of ranks with the same heads, number
    ``dst.tp_rank % replicas`` sends.

    Parameters
    ----------
    src, dst : KVLayout
    src_pages, dst_pages : ints, shape [pages]
        The pages of the sequence, in its order. Page sizes may differ.
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
        heads, and the tokens begin at a page; otherwise exactly the rows of these tokens.

    Raises
    ------
    ValueError
        A missing buffer, different bytes for each token and head, tokens that a list does not
        hold, a page outside its buffer, a page of the destination that occurs twice,
        destination buffers that overlap, part of a page that is not made of rows. Names side,
        kind, layer and lengths.

    Examples
    --------
    >>> from cpattn import KVEntry, KVLayout, plan_kv_transfer
    >>> def layout(addr):
    ...     return KVLayout([KVEntry(0, "k", False, addr, 4608, 512)], page_size=8)
    >>> plan = plan_kv_transfer(layout(4096), layout(1 << 20), [2, 3, 7], [4, 5, 1])
    >>> plan.lengths.tolist(), (plan.src_addrs - 4096).tolist()
    ([512, 1024], [3584, 1024])
    """
    return _core.plan_kv_transfer(
        src, dst, src_pages, dst_pages, num_tokens, first_token, src_start, dst_start, cp_rank,
        cp_size, cp_share,
    )  # fmt: skip
