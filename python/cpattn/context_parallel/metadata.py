# SPDX-License-Identifier: Apache-2.0
"""Context-parallel metadata: which tokens each rank computes, and how many keys they see.

A batch of sequences, each with new tokens behind a cached prefix, is divided over
``cp_size`` ranks by one of three strategies (aliases in brackets):

``zigzag`` (``in-seq-split``, ``head_tail``)
    Every sequence is cut into ``2 * cp_size`` blocks, larger ones first, whose sizes
    differ by at most one. Rank r owns block r and block ``2 * cp_size - 1 - r``.
``interleave`` (``round-robin-split``)
    Token t of the flattened batch belongs to rank ``t % cp_size``.
``contiguous``
    Rank r owns tokens ``[L * r // cp_size, L * (r + 1) // cp_size)`` of every sequence.

Balance: the table gives the largest difference between two ranks, for W = cp_size and one sequence
of L new tokens after P cached ones. The bound of a batch is the sum over its sequences. Pairs are
the visible (query, key) pairs of causal attention, a measure of its work.

==========  ======  =======================================================================
strategy    tokens  pairs
==========  ======  =======================================================================
zigzag      1       P + 2 L, so a rank has at most 1 + 4 W / L of the mean; 0 if 2 W divides L
interleave  1       P + L, and over a whole batch the tokens still differ by at most 1
contiguous  1       P + L + (W - 1) ceil(L / W)**2, twice the mean on the last rank if L >> P, W
==========  ======  =======================================================================

With `weights`, ranks have pairs in proportion to their weights. ``contiguous`` gives later ranks
fewer consecutive tokens; ``zigzag`` also gives tokens in proportion to the weights. With
`page_size`, blocks begin at pages. Page borders shift cuts, and cuts in later sequences compensate
the shift; ``imbalance`` of the metadata tells the rest.
"""

from __future__ import annotations

from .. import _core
from .._core import ContextParallelMetadata as ContextParallelMetadata
from .._types import Indices, Reals
from ..profiling.calls import announced
from .shard import shard, unshard


@announced("build_cp_metadata")
def build_cp_metadata(
    extend_lens: Indices | None,
    seq_lens: Indices | None = None,
    *,
    cp_rank: int,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    kv_len_convention: str = "baked",
    compat: bool = False,
    weights: Reals | None = None,
    page_size: int | None = None,
) -> ContextParallelMetadata:
    """Plan one rank's share of a batch.

    Parameters
    ----------
    extend_lens : ints [bs]
        New tokens of each sequence; zero and fewer than ``2 * cp_size`` are allowed. Engines ask
        `can_apply_cp` first.
    seq_lens : ints [bs], optional
        Cached prefix plus new tokens. Default: no prefix.
    cp_rank, cp_size : int
        This rank, and the number of ranks, at most 2**15.
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias.
    num_tokens : int, optional
        Tokens of the batch with padding. Tokens beyond the sum of `extend_lens` count as new tokens
        of the last sequence, whose prefix stays.
    kv_len_convention : {"baked", "bare"}
        Whether the ``kv_len_*`` fields include the cached prefix ("baked") or not.
    compat : bool
        Whether to accept what engines accept: `seq_lens` of another length mean no prefix, a
        sequence with ``seq_lens < extend_lens`` has no prefix, and ``extend_lens=None`` stands for
        `seq_lens`, or else for ``[num_tokens]``.
    weights : floats [cp_size], optional
        Speed of each rank, finite and above 0, in any unit: a rank with twice the weight has twice
        as many pairs of queries and keys. The cut is the same on every machine.
        ``"interleave"`` refuses weights. With `page_size` alone all weights are equal.
    page_size : int, optional
        Cuts tokens only at pages of so many positions, cached ones counted. There must be at least
        cp_size pages with new tokens. ``"interleave"`` refuses it.

    Returns
    -------
    ContextParallelMetadata
        Every field of the engines' metadata under its own name: ``*_list`` and the layout
        lists as lists of int, ``*_tensor`` as read-only int32 arrays, None where the
        strategy has no such field.

    Raises
    ------
    TypeError, ValueError
        If lengths or sizes are no integers, or an argument breaks a rule; the message names
        argument, rule, value and position.

    Examples
    --------
    >>> import numpy as np
    >>> plan = build_cp_metadata([10, 14], [15, 14], cp_rank=1, cp_size=2)
    >>> plan.actual_seq_q_prev_list, plan.kv_len_prev_list
    ([3, 4], [11, 8])
    >>> plan.shard(np.arange(24))
    array([ 3,  4,  5, 14, 15, 16, 17,  6,  7, 18, 19, 20])

    A machine that is three times as fast as the other, and pages of 16 tokens:

    >>> options = {"strategy": "contiguous", "weights": [3, 1], "page_size": 16}
    >>> plan = build_cp_metadata([1000], cp_rank=0, cp_size=2, **options)
    >>> plan.split_list, plan.per_rank_pairs, round(plan.imbalance, 3)
    ([864, 136], [373680, 126820], 1.014)
    """
    return _core.build_cp_metadata(
        extend_lens, seq_lens, cp_rank, cp_size, strategy, num_tokens, kv_len_convention, compat,
        weights, page_size,
    )  # fmt: skip


@announced("build_cp_metadata_all_ranks")
def build_cp_metadata_all_ranks(
    extend_lens: Indices | None,
    seq_lens: Indices | None = None,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    kv_len_convention: str = "baked",
    compat: bool = False,
    weights: Reals | None = None,
    page_size: int | None = None,
) -> list[ContextParallelMetadata]:
    """Plan every rank's share, as `build_cp_metadata` would for each rank.

    One allocation holds the arrays of all ranks; arrays that do not depend on the rank exist once.
    The allocation lives as long as any of the plans.

    Parameters
    ----------
    extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat, weights, \
page_size
        See `build_cp_metadata`.

    Returns
    -------
    list of ContextParallelMetadata
        Metadata of each rank, in rank order.

    Raises
    ------
    TypeError, ValueError
        See `build_cp_metadata`.

    Examples
    --------
    >>> plans = build_cp_metadata_all_ranks([10, 14], [15, 14], cp_size=2)
    >>> [plan.per_rank_actual_token[plan.cp_rank] for plan in plans]
    [12, 12]
    """
    return _core.build_cp_metadata_all_ranks(
        extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat, weights,
        page_size,
    )  # fmt: skip


# No subclass like `KVLayout`: the core makes these values and would have to know the subclass.
ContextParallelMetadata.shard = shard  # type: ignore[method-assign]
ContextParallelMetadata.unshard = unshard  # type: ignore[method-assign]
ContextParallelMetadata.__module__ = "cpattn"
