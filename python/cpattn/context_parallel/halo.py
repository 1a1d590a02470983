# SPDX-License-Identifier: Apache-2.0
"""Exchanges of rows between ranks: halos, changes of the layout, and states of unfinished units.

Convolutions, windows and compressors compute a unit from several rows; `plan_halo` plans the rows
that come from other ranks. Stateful layers want consecutive tokens on a rank where attention wants
a zigzag; `plan_relayout` plans the change. Rows of unfinished units are kept for later tokens;
`plan_pending` plans where. All plans have the arguments of ``all_to_all_single``: rows to send, in
the order of ranks, and row counts to and from each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .._types import Indices
    from .metadata import ContextParallelMetadata
    from .vllm_0_32 import PCPLayout

    Ints = NDArray[np.int64]

__all__ = ["HaloPlan", "RelayoutPlan", "plan_halo", "plan_pending", "plan_relayout"]


class HaloPlan(NamedTuple):
    """One rank's part in an exchange for units that are computed from several rows.

    Row numbers count the rank's own rows, then received rows by source rank, then rows read from a
    cache. A segment is consecutive tokens of a request on the rank. Its "extended" rows are the
    rows before it (the halo), then its own.

    Attributes
    ----------
    send_counts, recv_counts : list of int [cp_size]
        Rows to and from each rank; 0 for this rank. Sender and receiver have the same count.
    send_indices : array [sum of send_counts], int64
        Own rows, in sending order.
    cached_request, cached_position : arrays [num_cached], int64
        Request and position of each row read from a cache: tokens before the new ones.
    segment_request : array [n], int64
        Request of each segment, in the order of the rows.
    halo_lens : array [n], int64
        Halo rows before each segment.
    extended_indptr : array [n + 1], int64
        Begin of the extended rows of each segment, then their total number.
    extended_indices : array [extended_indptr[-1]], int64
        Row number of each extended row.
    unit_request, unit_ids : arrays [m], int64
        Request of each unit that this rank computes, and its number in the request, by segments.
    unit_starts, unit_lens : arrays [m], int64
        First extended row and number of rows of each unit; fewer than `window` if a request begins.

    Examples
    --------
    >>> import cpattn
    >>> metadata = cpattn.build_cp_metadata([8], cp_rank=1, cp_size=2, strategy="contiguous")
    >>> plan_halo(metadata, window=3).recv_counts  # two rows before its own
    [2, 0]
    """

    send_counts: list[int]
    recv_counts: list[int]
    send_indices: Ints
    cached_request: Ints
    cached_position: Ints
    segment_request: Ints
    halo_lens: Ints
    extended_indptr: Ints
    extended_indices: Ints
    unit_request: Ints
    unit_ids: Ints
    unit_starts: Ints
    unit_lens: Ints


def plan_halo(
    metadata: ContextParallelMetadata | PCPLayout,
    *,
    window: int,
    ratio: int = 1,
    rank: int | None = None,
) -> HaloPlan:
    """Plan which rows ranks exchange so that each can compute units of several rows.

    Unit u of a request needs rows ``(u + 1) * ratio - window`` to ``(u + 1) * ratio - 1``, without
    rows before its first token. The rank with the last row computes the unit, so the ranks compute
    every unit that the new tokens complete exactly once. Each rank receives each missing row once,
    from any rank that has it, near or far.

    Parameters
    ----------
    metadata : ContextParallelMetadata or PCPLayout
        Metadata of this rank, whose padding tokens count as tokens of the last request, or a
        PCPLayout. An interleaved row is a segment of its own. Requests that a layout has on all
        ranks are not sent, and each rank computes all their units.
    window : int
        Rows of a unit, at least `ratio`: the width of a causal convolution, the visible keys of a
        token in sliding-window attention, or, for a compressor, `ratio`, or ``2 * ratio`` if its
        windows overlap.
    ratio : int
        Rows from one unit to the next, at least 1.
    rank : int, optional
        This rank, if `metadata` is a PCPLayout.

    Returns
    -------
    HaloPlan

    Raises
    ------
    TypeError
        If `metadata` has another type, or a number is no integer.
    ValueError
        If `ratio` is below 1, `window` is below `ratio`, or a number is beyond int32; if a
        PCPLayout comes without one of its ranks, or metadata come with another rank than their own.

    Examples
    --------
    The compressor of DeepSeek-V4 with ratio 4 makes a unit of 8 rows. Rank 1 has tokens 5 to 9:

    >>> import cpattn, numpy as np
    >>> rank = [cpattn.build_cp_metadata([10], cp_rank=r, cp_size=2, strategy="contiguous")
    ...         for r in range(2)]
    >>> plans = [plan_halo(one, window=8, ratio=4) for one in rank]
    >>> plans[0].send_counts, plans[0].send_indices
    ([0, 5], array([0, 1, 2, 3, 4]))
    >>> rows = np.concatenate([rank[1].shard(np.arange(10)), plans[0].send_indices])
    >>> rows[plans[1].extended_indices]
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> plans[1].unit_ids, plans[1].unit_starts, plans[1].unit_lens
    (array([1]), array([0]), array([8]))
    """
    return HaloPlan(*_core.plan_halo(metadata, window, ratio, rank))


class RelayoutPlan(NamedTuple):
    """One rank's part in an exchange of rows from one layout to another.

    Attributes
    ----------
    send_counts, recv_counts : list of int [cp_size]
        Rows to and from each rank, including rows that stay on this rank. Multiply by the bytes of
        a row to get bytes.
    send_indices : array [sum of send_counts], int64
        Own rows, in sending order.
    recv_indices : array [sum of recv_counts], int64
        Row in the target of each received row.

    Examples
    --------
    >>> import cpattn
    >>> even, zigzag = (
    ...     cpattn.build_cp_metadata([8], cp_rank=0, cp_size=2, strategy=strategy)
    ...     for strategy in ("contiguous", "zigzag")
    ... )
    >>> plan = plan_relayout(even, zigzag)  # from tokens 0 to 3 to tokens 0, 1, 6 and 7
    >>> plan.send_counts, plan.send_indices, plan.recv_indices
    ([2, 2], array([0, 1, 2, 3]), array([0, 1, 2, 3]))
    """

    send_counts: list[int]
    recv_counts: list[int]
    send_indices: Ints
    recv_indices: Ints


def plan_relayout(source: ContextParallelMetadata, target: ContextParallelMetadata) -> RelayoutPlan:
    """Plan how rows of a batch go from one layout to another over the same ranks.

    ``received[i]``, the i-th received row by source rank, is row ``recv_indices[i]`` of the target.
    Swap source and target for the way back.

    Parameters
    ----------
    source, target : ContextParallelMetadata
        Metadata of this rank for one batch, in any strategies.

    Returns
    -------
    RelayoutPlan

    Raises
    ------
    TypeError, ValueError
        If `source` or `target` is no ContextParallelMetadata, or they differ in rank or lengths.

    Examples
    --------
    >>> import cpattn, numpy as np
    >>> states, attention = (
    ...     cpattn.build_cp_metadata_all_ranks([9], cp_size=2, strategy=strategy)
    ...     for strategy in ("contiguous", "zigzag")
    ... )
    >>> plans = [plan_relayout(*pair) for pair in zip(states, attention)]
    >>> sent = [plan.send_indices + 4 * rank for rank, plan in enumerate(plans)]  # as tokens
    >>> to_rank_0 = [rows[:plan.send_counts[0]] for rows, plan in zip(sent, plans)]
    >>> np.concatenate(to_rank_0)[np.argsort(plans[0].recv_indices)]
    array([0, 1, 2, 7, 8])
    """
    return RelayoutPlan(*_core.plan_relayout(source, target))


def plan_pending(
    metadata: ContextParallelMetadata | PCPLayout,
    *,
    window: int,
    ratio: int = 1,
    keepers: Indices | None = None,
    rank: int | None = None,
) -> RelayoutPlan:
    """Plan which rows ranks keep for units that later tokens complete.

    A request with n tokens has the pending rows from ``(n // ratio + 1) * ratio - window`` on:
    fewer than `window`, the state of a compressor or convolution. Position p of request r is row
    ``r * window + p % window`` of the target, which keeps the rows of earlier steps. The
    ``cached_request`` and ``cached_position`` of the next step's `HaloPlan` are read from there.

    Parameters
    ----------
    metadata, window, ratio, rank
        See `plan_halo`. Metadata must have no padding, which would count as tokens here.
    keepers : ints [bs], optional
        Rank that keeps the rows of each request, the same in every step, or -1 for all ranks.
        Default: all ranks. One rank suffices if it computes all later tokens, as in decoding.

    Returns
    -------
    RelayoutPlan
        Source rows are the rank's rows. Rows of a request that each rank has whole are not sent.

    Raises
    ------
    TypeError, ValueError
        As for `plan_halo`; also if `keepers` has no ranks, or not one for each request.

    Examples
    --------
    Tokens 6 to 9 are in the window of the next unit, the overlap among them:

    >>> import cpattn
    >>> metadata = cpattn.build_cp_metadata([10], cp_rank=1, cp_size=2, strategy="contiguous")
    >>> plan = plan_pending(metadata, window=6, ratio=4, keepers=[1])
    >>> plan.send_counts, plan.send_indices, plan.recv_indices
    ([0, 4], array([1, 2, 3, 4]), array([0, 1, 2, 3]))
    """
    return RelayoutPlan(*_core.plan_pending(metadata, window, ratio, keepers, rank))
