# SPDX-License-Identifier: Apache-2.0
"""What rows see of the keys of one rank, as sequences that `paged_attention` takes.

The keys of a rank are not consecutive positions, but they are in ascending order. A causal row
therefore sees the first c of them. Rows of which each sees one key more than the one before are a
causal sequence, whoever computes them; rows that see the same keys are a sequence that is not
causal. A row of either kind reads no key that it does not see.

Windows and masks have no such form: there the rows go in blocks with a mask of the keys between
the first and the last that one of them sees.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray

from .key_shares import Array, KeyShares, LocalPages

_BLOCK_ROWS = 64
# Keys before a block of masked rows are left out by so many: where the kernels' blocks of keys
# begin, so that the bits of a row do not depend on which rows share its block.
_BLOCK_KEYS = 1024


@dataclass(frozen=True)
class Rows:
    """The rows of some queries: their request, and their position within it."""

    request: Array
    position: Array

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True)
class RowMask:
    """The mask of a plan: a row for each new token of a request, a bit for each of its keys."""

    bits: NDArray[np.uint8]
    first_byte: Array  # of each request
    row_bits: Array
    first_position: Array  # of its new tokens

    def visible(self, request: int, rows: Array, keys: Array) -> NDArray[np.bool_]:
        """Whether each of the rows sees each of the keys, both given by their positions."""
        row = (rows - self.first_position[request]) * self.row_bits[request]
        bit = row[:, None] + keys
        values: NDArray[np.bool_] = (
            self.bits[self.first_byte[request] + (bit >> 3)] >> (bit & 7).astype(np.uint8) & 1
        ).astype(bool)
        return values


@dataclass(frozen=True)
class Visibility:
    """Which keys a row sees, by their positions."""

    causal: bool
    window: int | None
    mask: RowMask | None


@dataclass(frozen=True)
class SequenceCall:
    """One call of `paged_attention`."""

    rows: torch.Tensor  # which rows of the queries, sequence after sequence
    q_lens: Array
    kv_indptr: Array
    kv_indices: Array
    last_page_len: Array
    page_size: int
    causal: bool
    packed_custom_mask: NDArray[np.uint8] | None = None


def sequence_calls(
    shares: KeyShares, rank: int, pages: LocalPages, rows: Rows, visibility: Visibility
) -> list[SequenceCall]:
    """The calls that compute rows over the keys of a rank, which are in the pages.

    Rows without a key are in none of them.
    """
    if visibility.window is None and visibility.mask is None:
        return _plain_calls(shares, rank, pages, rows, visibility.causal)
    return _masked_calls(shares, rank, pages, rows, visibility)


def _plain_calls(
    shares: KeyShares, rank: int, pages: LocalPages, rows: Rows, causal: bool
) -> list[SequenceCall]:
    lens = shares.kv_lens[rows.request]
    end = np.minimum(rows.position + 1, lens) if causal else lens
    keys = shares.count_below(rank, rows.request, end)
    order = np.lexsort((rows.position, keys, rows.request))
    order = order[keys[order] > 0]
    request, keys = rows.request[order], keys[order]

    # Of the rows that see the same keys the first ones make causal sequences: one for each request,
    # of the tokens that the rank holds itself. The others are either sequences of equal rows, or,
    # where tokens are dealt out one by one, causal sequences again: what makes fewer of them.
    index = np.arange(len(order))
    new_keys = _starts(request, keys)
    nth = index - np.maximum.accumulate(np.where(new_keys, index, 0))
    rising = np.lexsort((keys, nth, request))
    rises = _starts(request[rising], nth[rising], keys[rising] - index)
    equal = np.ones(len(order), dtype=bool)
    equal[rising[~_alone(rises) & (nth[rising] == 0)]] = False
    equal_starts = _starts(request[equal], keys[equal])
    of_first = nth[rising] == 0
    if rises[~of_first].sum() < equal_starts.sum():
        equal[:] = False
    else:
        chosen = ~equal[rising]
        rising, rises = rising[chosen], rises[chosen]
    flat = np.flatnonzero(equal)
    calls = [
        _call(pages, order, request, keys, rising, rises, True),
        _call(pages, order, request, keys, flat, equal_starts[: len(flat)], False),
    ]
    return [call for call in calls if call is not None]


def _alone(starts: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which values are at a start, with a start behind them."""
    return starts & np.append(starts[1:], True)


def _starts(*values: Array) -> NDArray[np.bool_]:
    """Where one of the values differs from that before."""
    starts = np.ones(len(values[0]), dtype=bool)
    if len(starts):
        starts[1:] = np.any([value[1:] != value[:-1] for value in values], axis=0)
    return starts


def _call(
    pages: LocalPages,
    order: Array,
    request: Array,
    keys: Array,
    chosen: Array,
    starts: NDArray[np.bool_],
    causal: bool,
) -> SequenceCall | None:
    """The call of the chosen ones of the ordered rows, a sequence at each of the starts."""
    if not len(chosen):
        return None
    begins = np.append(np.flatnonzero(starts), len(chosen))
    last = chosen[begins[1:] - 1]
    zeros = np.zeros(len(last), dtype=np.int64)
    return _of_pages(
        pages, order[chosen], np.diff(begins), request[last], zeros, keys[last], causal, None
    )


def _of_pages(
    pages: LocalPages,
    rows: Array,
    q_lens: Array,
    request: Array,
    first_key: Array,
    last_key: Array,
    causal: bool,
    mask: NDArray[np.uint8] | None,
) -> SequenceCall:
    """Sequences over the keys [first_key, last_key) of their requests, first_key on a new page."""
    size = pages.page_size
    begin = pages.indptr[request] + first_key // size
    counts = -(-last_key // size) - first_key // size
    indptr = np.append(0, np.cumsum(counts))
    which = np.repeat(begin - indptr[:-1], counts) + np.arange(indptr[-1])
    return SequenceCall(
        rows=torch.from_numpy(rows),
        q_lens=q_lens,
        kv_indptr=indptr,
        kv_indices=pages.ids[which],
        last_page_len=(last_key - 1) % size + 1,
        page_size=size,
        causal=causal,
        packed_custom_mask=mask,
    )


def _masked_calls(
    shares: KeyShares, rank: int, pages: LocalPages, rows: Rows, visibility: Visibility
) -> list[SequenceCall]:
    local = shares.local_keys(rank)
    key_begin = np.searchsorted(local.request, np.arange(len(shares.kv_lens)))
    first, last = _key_range(shares, rank, rows, visibility)
    first -= first % lcm(_BLOCK_KEYS, pages.page_size)
    order = np.lexsort((rows.position, rows.request))
    order = order[last[order] > first[order]]
    blocks: list[tuple[Array, int, int, int]] = []
    masks = []
    for begin, end in _blocks(rows.request[order]):
        chosen = order[begin:end]
        request = int(rows.request[chosen[0]])
        low, high = int(first[chosen].min()), int(last[chosen].max())
        keys = local.position[key_begin[request] + low : key_begin[request] + high]
        position = rows.position[chosen]
        visible = np.ones((len(chosen), len(keys)), dtype=bool)
        if visibility.causal:
            visible &= keys <= position[:, None]
        if visibility.window is not None:
            visible &= keys >= position[:, None] - visibility.window
        if visibility.mask is not None:
            visible &= visibility.mask.visible(request, position, keys)
        masks.append(np.packbits(visible, bitorder="little"))
        blocks.append((chosen, request, low, high))
    if not blocks:
        return []
    lens = np.array([len(block[0]) for block in blocks])
    requests, low_keys, high_keys = np.array([block[1:] for block in blocks]).T
    chosen = np.concatenate([block[0] for block in blocks])
    mask = np.concatenate(masks)
    return [_of_pages(pages, chosen, lens, requests, low_keys, high_keys, False, mask)]


def _key_range(
    shares: KeyShares, rank: int, rows: Rows, visibility: Visibility
) -> tuple[Array, Array]:
    """The first key of the rank that causality and window let each row see, and that after it."""
    lens = shares.kv_lens[rows.request]
    end = np.minimum(rows.position + 1, lens) if visibility.causal else lens
    begin = np.zeros_like(end)
    if visibility.window is not None:
        begin = np.clip(rows.position - visibility.window, 0, lens)
    return (
        shares.count_below(rank, rows.request, begin),
        shares.count_below(rank, rows.request, end),
    )


def _blocks(request: Array) -> list[tuple[int, int]]:
    """Up to _BLOCK_ROWS rows of one request each."""
    ends = np.append(np.flatnonzero(_starts(request)), len(request))
    return [
        (begin, min(begin + _BLOCK_ROWS, int(end)))
        for start, end in itertools.pairwise(ends)
        for begin in range(int(start), int(end), _BLOCK_ROWS)
    ]
