# SPDX-License-Identifier: Apache-2.0
"""Placement of keys and values on ranks, and what each rank then attends to: integers.

Stripes of tokens go round the ranks. With ``page_interleave`` a stripe is a page, and page P of a
sequence belongs to rank ``(base + P) % cp_size``, where the base is the rank that keeps the fewest
pages when the sequence comes, the lowest of them on ties. With ``token_interleave`` a stripe is a
token, or I of them by ``token_interleave:I``, and every base is rank 0. Sequences come in the
order of the batch, into empty pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpattn.context_parallel.metadata import ContextParallelMetadata
from cpattn.context_parallel.placement_name import BY_PAGES, REPLICATED, PlacementName

from .layer import AttentionLayer, Ints


@dataclass(frozen=True)
class Stripes:
    """Tokens of sequences in stripes over ranks, as a placement says.

    Attributes
    ----------
    size : int
        Tokens of a stripe.
    cp_size : int
        Number of ranks.
    bases : array [bs], int64
        The rank that has the first stripe of each sequence.
    """

    size: int
    cp_size: int
    bases: Ints

    @property
    def places(self) -> Ints:
        """[cp_size, bs]: which stripe of every `cp_size` is the rank's, counted from 0."""
        return (np.arange(self.cp_size)[:, None] - self.bases) % self.cp_size

    def count_below(self, end: Ints) -> Ints:
        """[cp_size, bs]: tokens of the rank before position `end` of each sequence."""
        rounds, rest = np.divmod(end, self.size * self.cp_size)
        return rounds * self.size + self._within(rest)

    def sum_below(self, end: Ints) -> Ints:
        """[cp_size, bs]: the sum of their positions."""
        size, around = self.size, self.size * self.cp_size
        rounds, rest = np.divmod(end, around)
        first, within = self.places * size, self._within(rest)
        whole = size * around * (rounds * (rounds - 1) // 2)
        whole = whole + rounds * (size * first + size * (size - 1) // 2)
        return whole + within * (rounds * around + first) + within * (within - 1) // 2

    def owners(self, positions: Ints, sequences: Ints) -> Ints:
        """The rank of each token, by its position and its sequence."""
        return (positions // self.size + self.bases[sequences]) % self.cp_size

    def _within(self, rest: Ints) -> Ints:
        """Count the tokens of the rank's stripe among the first `rest` of a round."""
        return np.clip(rest - self.places * self.size, 0, self.size)


def stripe_size(placement: str, page_size: int) -> int:
    """Tokens of a stripe."""
    name = PlacementName.parse(placement)
    assert name is not None  # `check_placing` has seen to it
    return page_size if name.kind == BY_PAGES else name.interleave


def stripes(placement: str, seq_lens: Ints, cp_size: int, page_size: int) -> Stripes:
    """Lay sequences out over ranks; `placement` is one that shards."""
    if placement != BY_PAGES:
        size = stripe_size(placement, page_size)
        return Stripes(size, cp_size, np.zeros(len(seq_lens), np.int64))
    bases = np.zeros(len(seq_lens), np.int64)
    pages = np.zeros(cp_size, np.int64)
    for i, count in enumerate((-(-seq_lens // page_size)).tolist()):
        bases[i] = base = int(pages.argmin())
        pages += count // cp_size
        pages[(base + np.arange(count % cp_size)) % cp_size] += 1
    return Stripes(page_size, cp_size, bases)


def pages_per_rank(placement: str, seq_lens: Ints, cp_size: int, page_size: int) -> Ints:
    """[cp_size]: pages of sequences in the pool of each rank.

    By ``token_interleave`` a page holds every `cp_size`-th token or run of them, and all ranks have
    the same block table: of as many pages as rank 0 fills.
    """
    if placement == BY_PAGES:
        laid = stripes(placement, seq_lens, cp_size, page_size)
        pages = -(-seq_lens // page_size)
        around = Stripes(1, cp_size, laid.bases)
        return around.count_below(pages).sum(1)
    run = stripe_size(placement, page_size)
    turn = run * (1 if placement == REPLICATED else cp_size)
    kept = seq_lens // turn * run + np.minimum(seq_lens % turn, run)  # by rank 0, which has most
    return np.full(cp_size, (-(-kept // page_size)).sum(), np.int64)


def first_seen(extends: Ints, seq_lens: Ints, most_keys: int) -> Ints:
    """[bs]: the first position that a new token of the sequence sees; its end if it has none."""
    return np.where(extends > 0, np.maximum(seq_lens - extends - most_keys + 1, 0), seq_lens)


def pairs_by_owner(extends: Ints, seq_lens: Ints, layer: AttentionLayer, laid: Stripes) -> Ints:
    """[cp_size, bs]: pairs of any new token and a key that it sees and the rank keeps.

    Key k is seen by the new tokens from ``max(k - keys_behind, prefix)`` up to, not including,
    ``min(k + most_keys, seq_len)``.
    """
    prefix, most = seq_lens - extends, layer.most_keys
    begin = first_seen(extends, seq_lens, most)
    capped = np.clip(seq_lens - most, begin, seq_lens)  # from here on the sequence ends first
    middle = np.clip(prefix + layer.keys_behind, begin, seq_lens)
    count_begin, count_end = laid.count_below(begin), laid.count_below(seq_lens)
    count_capped, sum_begin = laid.count_below(capped), laid.sum_below(begin)
    last = laid.sum_below(capped) - sum_begin + most * (count_capped - count_begin)
    last = last + seq_lens * (count_end - count_capped)
    first = prefix * (laid.count_below(middle) - count_begin)
    first = first + laid.sum_below(seq_lens) - laid.sum_below(middle)
    first = first - layer.keys_behind * (count_end - laid.count_below(middle))
    return np.asarray(last - first)


@dataclass(frozen=True)
class Shards:
    """Rows of keys and values in the pools of ranks, for one layer of one batch.

    Rank k of a host exchanges with rank k of every other host; ranks of a host read what the
    others of it have. With a rank for each host these are all ranks.

    Attributes
    ----------
    seen_rows : array [cp_size], int64
        Rows, cached and new, that the rank keeps and a new token sees.
    seen_cached_rows : array [cp_size], int64
        Cached ones of them.
    kept_at_home : array [cp_size], int64
        New rows that the rank computes, and its host keeps.
    arriving_rows : array [cp_size], int64
        New rows that the rank puts into the pool of its host: it computes or receives them.
    """

    seen_rows: Ints
    seen_cached_rows: Ints
    kept_at_home: Ints
    arriving_rows: Ints


def shards(
    plans: Sequence[ContextParallelMetadata],
    extends: Ints,
    seq_lens: Ints,
    layer: AttentionLayer,
    laid: Stripes,
    ranks_per_host: int,
) -> Shards:
    """Count the rows of pools, and the new ones that go to other hosts."""
    num_hosts = laid.cp_size // ranks_per_host
    home = np.zeros(laid.cp_size, np.int64)
    arriving = np.zeros((num_hosts, ranks_per_host), np.int64)
    for rank, plan in enumerate(plans):
        positions = np.asarray(plan.query_cache_lengths, np.int64) - 1
        owners: Any = laid.owners(positions, np.asarray(plan.query_request_indices))
        hosts = np.bincount(owners // ranks_per_host, minlength=num_hosts)
        home[rank] = hosts[rank // ranks_per_host]
        arriving[:, rank % ranks_per_host] += hosts
    begin = first_seen(extends, seq_lens, layer.most_keys)
    hidden = laid.count_below(begin)
    seen, cached = (laid.count_below(ends) - hidden for ends in (seq_lens, seq_lens - extends))
    return Shards(seen.sum(1), cached.sum(1), home, arriving.ravel())
