# SPDX-License-Identifier: Apache-2.0
"""Placement of keys and values on ranks, and the resulting attention work: integers.

Stripes of tokens go round the ranks. With ``page_interleave`` a stripe is a page, and page P of a
sequence belongs to rank ``(base + P) % cp_size``. The base is the rank with the fewest pages when
the sequence arrives, the lowest on ties. With ``token_interleave`` a stripe is a token, or I tokens
with ``token_interleave:I``, and every base is rank 0. Sequences arrive in batch order, into empty
pools.
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
    """Stripes of sequences over ranks, by a placement.

    Attributes
    ----------
    size : int
        Tokens per stripe.
    cp_size : int
        Number of ranks.
    bases : array [bs], int64
        Rank of the first stripe of each sequence.
    """

    size: int
    cp_size: int
    bases: Ints

    @property
    def places(self) -> Ints:
        """Return [cp_size, bs]: the rank's index among every `cp_size` stripes, from 0."""
        return (np.arange(self.cp_size)[:, None] - self.bases) % self.cp_size

    def count_below(self, end: Ints) -> Ints:
        """Return [cp_size, bs]: tokens of the rank before position `end` of each sequence."""
        rounds, rest = np.divmod(end, self.size * self.cp_size)
        return rounds * self.size + self._within(rest)

    def sum_below(self, end: Ints) -> Ints:
        """Return [cp_size, bs]: the sum of their positions."""
        size, around = self.size, self.size * self.cp_size
        rounds, rest = np.divmod(end, around)
        first, within = self.places * size, self._within(rest)
        whole = size * around * (rounds * (rounds - 1) // 2)
        whole = whole + rounds * (size * first + size * (size - 1) // 2)
        return whole + within * (rounds * around + first) + within * (within - 1) // 2

    def owners(self, positions: Ints, sequences: Ints) -> Ints:
        """Return the rank of each token, by its position and its sequence."""
        return (positions // self.size + self.bases[sequences]) % self.cp_size

    def _within(self, rest: Ints) -> Ints:
        """Count the tokens of the rank's stripe among the first `rest` of a round."""
        return np.clip(rest - self.places * self.size, 0, self.size)


def stripe_size(placement: str, page_size: int) -> int:
    """Return the tokens per stripe."""
    name = PlacementName.parse(placement)
    assert name is not None  # checked by `check_placing`
    return page_size if name.kind == BY_PAGES else name.interleave


def stripes(placement: str, seq_lens: Ints, cp_size: int, page_size: int) -> Stripes:
    """Lay sequences out over ranks; `placement` must be a sharded one."""
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
    """Return [cp_size]: pages of sequences in the pool of each rank.

    With ``token_interleave`` a page holds every `cp_size`-th token or run, and all ranks have the
    same block table, with as many pages as rank 0 fills.
    """
    if placement == BY_PAGES:
        laid = stripes(placement, seq_lens, cp_size, page_size)
        pages = -(-seq_lens // page_size)
        around = Stripes(1, cp_size, laid.bases)
        return around.count_below(pages).sum(1)
    run = stripe_size(placement, page_size)
    turn = run * (1 if placement == REPLICATED else cp_size)
    kept = seq_lens // turn * run + np.minimum(seq_lens % turn, run)  # rank 0 keeps most
    return np.full(cp_size, (-(-kept // page_size)).sum(), np.int64)


def first_seen(extends: Ints, seq_lens: Ints, most_keys: int) -> Ints:
    """Return [bs]: the first position that a new token of a sequence sees, or its end if none."""
    return np.where(extends > 0, np.maximum(seq_lens - extends - most_keys + 1, 0), seq_lens)


def pairs_by_owner(extends: Ints, seq_lens: Ints, layer: AttentionLayer, laid: Stripes) -> Ints:
    """Return [cp_size, bs]: pairs of any new token and a visible key of the rank.

    New tokens from ``max(k - keys_behind, prefix)`` up to, not including,
    ``min(k + most_keys, seq_len)`` see key k.
    """
    prefix, most = seq_lens - extends, layer.most_keys
    begin = first_seen(extends, seq_lens, most)
    capped = np.clip(seq_lens - most, begin, seq_lens)  # the sequence ends first from here on
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

    Rank k of a host exchanges with rank k of every other host; ranks of a host read each other's
    rows. With one rank per host, all ranks exchange.

    Attributes
    ----------
    seen_rows : array [cp_size], int64
        Rows, cached and new, that the rank keeps and a new token sees.
    seen_cached_rows : array [cp_size], int64
        Number of cached rows among them.
    kept_at_home : array [cp_size], int64
        New rows that the rank computes and its host keeps.
    arriving_rows : array [cp_size], int64
        New rows, computed or received, that the rank puts into the pool of its host.
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
    """Count the rows of pools, and the new rows that go to other hosts."""
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
