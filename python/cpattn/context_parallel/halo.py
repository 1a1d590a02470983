# SPDX-License-Identifier: Apache-2.0
"""Rows that go from rank to rank: halos, changes of the layout, and the state of units to come.

Convolutions, windows and compressors make a unit of several rows, some of which the rank before
has: `plan_halo`. Layers with a state want consecutive tokens on a rank where attention wants a
zigzag: `plan_relayout`. Rows of units that are not complete wait for the others: `plan_pending`.
All give what ``all_to_all_single`` takes: the rows that a rank sends, in the order of ranks, and
how many go to and come from each.
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
    """One rank's part in an exchange by which units are made of several rows.

    Rows are numbered through all that a rank has then: its own, then those that it received, of
    rank 0 first, then those that it reads from a cache. "Extended" rows are those before a segment,
    the halo, and its own; a segment is consecutive tokens of a request on the rank.

    Attributes
    ----------
    send_counts, recv_counts : list of int [cp_size]
        Rows that go to and come from each rank; 0 for this one. Of a pair of ranks both agree.
    send_indices : array [sum of send_counts], int64
        Own rows, in the order in which they are sent.
    cached_request, cached_position : arrays [num_cached], int64
        Rows that are read from a cache: tokens before the new ones.
    segment_request : array [n], int64
        Request of each segment, in the order of the rows.
    halo_lens : array [n], int64
        Rows in front of each segment.
    extended_indptr : array [n + 1], int64
        Where the extended rows of each segment begin, and the number of all.
    extended_indices : array [extended_indptr[-1]], int64
        The row of each extended one.
    unit_request, unit_ids : arrays [m], int64
        Units that this rank computes, each by its request and its number there, by segments.
    unit_starts, unit_lens : arrays [m], int64
        The extended rows that each is made of. Fewer than the window where a request begins.

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

    Unit u of a request is made of its rows ``(u + 1) * ratio - window`` to ``(u + 1) * ratio - 1``,
    without those before its first token. The rank that has the last row computes it, so every unit
    that the new tokens complete is computed once, and unfinished ones are not. Each row that
    another rank lacks is sent to it once, from whichever ranks have it, near or far.

    Parameters
    ----------
    metadata : ContextParallelMetadata or PCPLayout
        The former is of this rank, and its padding tokens count as those of the last request. An
        interleaved row is a segment of its own. Requests that a layout has on all ranks are whole
        there: nothing of them is sent, and each rank computes their units.
    window : int
        Rows that a unit is made of, at least `ratio`: the width of a causal convolution; the
        keys that a token of sliding-window attention sees; of a compressor, `ratio`, or
        ``2 * ratio`` if its windows overlap.
    ratio : int
        Rows from one unit to the next, at least 1.
    rank : int, optional
        This rank, where `metadata` is a layout.

    Returns
    -------
    HaloPlan

    Raises
    ------
    TypeError
        If `metadata` is none, or a number is no integer.
    ValueError
        For a `ratio` below 1, a `window` below `ratio`, and numbers beyond int32; for a layout
        without a `rank` that it has, and for metadata with that of another.

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
    """One rank's part in an exchange by which rows go from one layout to another.

    Attributes
    ----------
    send_counts, recv_counts : list of int [cp_size]
        Rows to and from each rank; those that stay on the rank count, too. Bytes are these times
        those of a row.
    send_indices : array [sum of send_counts], int64
        Own rows in the order in which they are sent.
    recv_indices : array [sum of recv_counts], int64
        The row in the target of each that is received.

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

    ``received[i]``, the i-th row that comes in, of rank 0 first, is row ``recv_indices[i]`` of the
    target. With source and target exchanged it is the way back.

    Parameters
    ----------
    source, target : ContextParallelMetadata
        Of this rank and one batch, in any strategies.

    Returns
    -------
    RelayoutPlan

    Raises
    ------
    TypeError
        If one of them is none.
    ValueError
        If they are of different ranks or lengths.

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

    Of a request with n tokens they are those from ``(n // ratio + 1) * ratio - window`` on: less
    than `window` rows, the state of a compressor or convolution. Position p of request r is row
    ``r * window + p % window`` of the target, which has those of earlier steps already: there are
    the ``cached_request`` and ``cached_position`` of the next step's `HaloPlan`.

    Parameters
    ----------
    metadata, window, ratio, rank
        As of `plan_halo`. Metadata must be without padding, which would count as tokens here.
    keepers : ints [bs], optional
        The rank that keeps the rows of each request, always the same one, or -1 for all ranks;
        default: all. One suffices where it computes all tokens to come, as in decoding.

    Returns
    -------
    RelayoutPlan
        Its source are the rank's rows. Those of a request that each rank has whole are not sent.

    Raises
    ------
    TypeError, ValueError
        As `plan_halo`; also for keepers that are no ranks, or not one for each request.

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


for _value in (HaloPlan, RelayoutPlan):
    _value.__module__ = __name__
