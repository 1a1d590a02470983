# SPDX-License-Identifier: Apache-2.0
"""Computation and communication of every rank for one layer of one batch: exact integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpattn import _core
from cpattn._limits import check_kind
from cpattn.context_parallel.metadata import ContextParallelMetadata, build_cp_metadata_all_ranks

from ..limits import check_seq_lens
from .layer import UNBOUNDED, AttentionLayer, Ints

# The rule by which `plan_attention` cuts rows of a segment into items, which pack their keys once.
PACKING_ROWS = 12  # cost of packing a key, in rows of arithmetic
_MAX_ITEM_ROWS, _MIN_ITEM_ROWS, _ROW_GRANULE = 2048, 384, 24
_BALANCED_ITEMS = 64
_ITEM_BYTES = 4 << 20

Numbers = Any  # an array of whole or of real numbers


@dataclass(frozen=True)
class RankWork:
    """Work of each rank for one layer of one batch, as counted by `rank_work`.

    A pair is a query token and a visible key. An item is the work of one thread: some tokens of one
    sequence with the heads of one KV head.

    Attributes
    ----------
    tokens : array [cp_size], int64
        New tokens of each rank.
    pairs : array [cp_size], int64
        Pairs in one query head, equal for all heads.
    packed_keys : array [cp_size], float64
        Keys that items pack before products, summed over the items of one KV head; exact up to one
        token per item. Keys outside the window of all tokens of an item are left out.
    longest_item : array [cp_size], float64
        Cost of the most expensive item in (row, key) pairs, with packing at 12 rows per key. A row
        is a token in one query head.
    sent_bytes, received_bytes : arrays [cp_size], int64
        Bytes of `ContextParallel.write_kv`, without digests.

    Examples
    --------
    >>> from cpattn_lab.cost_model import rank_work
    >>> work = rank_work([8], [8], cp_size=2, strategy="contiguous")
    >>> work.tokens, work.pairs            # the second half sees the first
    (array([4, 4]), array([10, 26]))
    >>> round(work.imbalance, 3)           # 26 of a mean of 18
    1.444
    """

    tokens: Ints
    pairs: Ints
    packed_keys: NDArray[np.float64]
    longest_item: NDArray[np.float64]
    sent_bytes: Ints
    received_bytes: Ints

    @property
    def imbalance(self) -> float:
        """Pairs of the most loaded rank over the mean: 1 is perfect, cp_size the worst.

        The value is 1 for a batch without new tokens.
        """
        mean = self.pairs.mean()
        return float(self.pairs.max() / mean) if mean else 1.0


def checked_batch(function: str, extend_lens: Any, seq_lens: Any) -> tuple[Ints, Ints]:
    """Return the checked lengths of a batch as arrays."""
    extends = np.array(_core.ints(extend_lens, function, "extend_lens"), np.int64)
    lengths = np.array(_core.ints(seq_lens, function, "seq_lens"), np.int64)
    check_seq_lens(function, lengths.tolist(), extends.tolist())
    return extends, lengths


def rank_work(
    extend_lens: Sequence[int] | Any,
    seq_lens: Sequence[int] | Any,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    layer: AttentionLayer | None = None,
) -> RankWork:
    """Count the computation and communication of each of `cp_size` ranks for a batch.

    Parameters
    ----------
    extend_lens, seq_lens : ints [bs]
        New tokens of each sequence, and its length including them and cached tokens.
    cp_size : int
        Number of ranks.
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias, as for `build_cp_metadata`.
    layer : AttentionLayer, default one with all defaults
        Sizes for the counts.

    Returns
    -------
    RankWork
        Arrays with an element for each rank.

    Raises
    ------
    TypeError
        If lengths or the number of ranks are no integers, or `strategy` is no str.
    ValueError
        If lengths do not match, a sequence is shorter than its new tokens, the number of ranks is
        outside [1, 32768], or the strategy is unknown.

    Examples
    --------
    >>> from cpattn_lab.cost_model import rank_work
    >>> work = rank_work([8], [12], cp_size=2)
    >>> work.tokens, work.pairs  # tokens 0, 1, 6 and 7 behind 4 cached ones see 5, 6, 11 and 12
    (array([4, 4]), array([34, 34]))
    """
    layer = AttentionLayer() if layer is None else layer
    check_kind("rank_work", "layer", layer, AttentionLayer)
    extends, lengths = checked_batch("rank_work", extend_lens, seq_lens)
    plans = build_cp_metadata_all_ranks(extends, lengths, cp_size=cp_size, strategy=strategy)
    return work_of_plans(plans, layer)


def work_of_plans(plans: Sequence[ContextParallelMetadata], layer: AttentionLayer) -> RankWork:
    """Count work for all ranks' `plans`.

    The work is the same if attention runs on each rank's share of the keys separately.
    """
    cp_size = len(plans)
    rows, first, step = _segments(plans)
    tokens = rows.sum(1)
    last = _last_keys(plans, rows, layer)
    pairs = _pairs(layer, last, first, step, rows)
    packed, longest = _items(rows, first, step, last, layer)
    return RankWork(
        tokens=tokens,
        pairs=pairs.sum(1),
        packed_keys=packed,
        longest_item=longest,
        sent_bytes=tokens * layer.kv_row_bytes * (cp_size - 1),
        received_bytes=(tokens.sum() - tokens) * layer.kv_row_bytes,
    )


def _segments(plans: Sequence[ContextParallelMetadata]) -> tuple[Ints, Ints, int]:
    """Return [ranks, segments] rows of each segment and keys that its first row sees, and the step:
    how many more keys each further row sees. Attention takes a segment from one sequence."""
    if plans[0].strategy == "interleave":
        rows = np.array([plan.rows_per_request() for plan in plans], dtype=np.int64)
        begin = np.cumsum(plans[0].per_rank_actual_token)
        ends = np.cumsum(rows, axis=1)
        lengths = np.concatenate([plan.query_cache_lengths for plan in plans] + [np.zeros(1, int)])
        offsets = np.concatenate([[0], begin[:-1]])[:, None] + ends - rows
        return rows, np.where(rows > 0, lengths[offsets], 0), len(plans)
    halves = ("prev", "next") if plans[0].strategy == "zigzag" else ("prev",)
    rows, ends = (
        np.array(
            [
                np.concatenate([getattr(plan, f"{name}_{half}_tensor") for half in halves])
                for plan in plans
            ],
            dtype=np.int64,
        )
        for name in ("actual_seq_q", "kv_len")
    )
    return rows, np.where(rows > 0, ends - rows + 1, 0), 1


def _last_keys(
    plans: Sequence[ContextParallelMetadata], rows: Ints, layer: AttentionLayer
) -> Numbers:
    """Return the end of keys for each segment: its sequence's end if rows see keys behind."""
    if not layer.keys_behind:
        return UNBOUNDED  # a row's own key exists
    prefixes = np.asarray(plans[0].prefix_lens, np.int64)
    of_halves = rows.reshape(len(plans), -1, len(prefixes))
    return np.tile(prefixes + of_halves.sum((0, 1)), of_halves.shape[1])


def _pairs(
    layer: AttentionLayer, last: Numbers, first: Numbers, step: int, rows: Numbers
) -> Numbers:
    """Return the sum of visible keys over rows, from the first to the last that each row sees."""
    hidden = _sum_up_to(UNBOUNDED, first, step, rows)
    hidden = hidden - _sum_up_to(layer.most_keys, first, step, rows)
    return _sum_up_to(last, first + layer.keys_behind, step, rows) - hidden


def _sum_up_to(limit: Numbers, first: Numbers, step: Numbers, rows: Numbers) -> Numbers:
    """Return the sum of ``min(first + i * step, limit)`` over the rows i."""
    below = np.clip((limit - first) // step + 1, 0, rows)
    return below * first + step * (below * (below - 1) // 2) + (rows - below) * limit


def _hidden_before(limit: int, first: Ints, step: Numbers, pieces: Ints) -> Numbers:
    """Return the keys before the window of the first row of each piece, summed over the pieces; the
    row sees `step` keys more than the first row of the previous piece."""
    within = np.clip(np.ceil((limit - first) / np.maximum(step, 1e-9)), 0, pieces)
    beyond = pieces - within
    return beyond * (first - limit) + step * beyond * (within + pieces - 1) / 2


def _items(
    rows: Ints, first: Ints, step: int, last: Numbers, layer: AttentionLayer
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the packed keys of each rank, and its most expensive item."""
    share = np.clip(
        rows.sum(1) * layer.num_heads // _BALANCED_ITEMS, _MIN_ITEM_ROWS, _MAX_ITEM_ROWS
    )
    max_rows = np.minimum(share, _ITEM_BYTES // (4 * layer.dims)) // _ROW_GRANULE * _ROW_GRANULE
    group = layer.num_heads // layer.num_kv_heads
    heads = np.minimum(group, max_rows)
    item_tokens = np.maximum(max_rows // heads, 1)[:, None]
    pieces = np.maximum(-(-rows // item_tokens), 1)
    size = rows / pieces
    apart = np.maximum(step * size, 1e-9)  # distance of two pieces
    packed = _sum_up_to(last, first - step + apart + layer.keys_behind, apart, pieces)
    packed = packed - _hidden_before(layer.most_keys, first, step * size, pieces)
    # The last piece sees most, or an earlier one whose window does not end with the sequence.
    first_of_last = first + step * (rows - size)
    items: Numbers = 0
    for before in (first_of_last, np.maximum(first_of_last - layer.keys_behind, first)):
        pairs = _pairs(layer, last, before, step, size)
        packed_keys = np.minimum(before + step * (size - 1) + layer.keys_behind, last)
        packed_keys = packed_keys - np.maximum(before - layer.most_keys, 0)
        items = np.maximum(items, pairs * heads[:, None] + PACKING_ROWS * packed_keys)
    splits = -(-group // heads)  # items that split the heads of a KV head each pack its keys
    return np.where(rows > 0, packed, 0).sum(1) * splits, np.where(rows > 0, items, 0).max(1)
