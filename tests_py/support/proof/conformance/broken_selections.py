# SPDX-License-Identifier: Apache-2.0
"""Operators that select keys, each wrong in one way.

Those of scores have the signature of `cpattn.sparse.fast_topk`.
"""

from __future__ import annotations

import os
import signal

import torch

from cpattn.sparse import dcp_local_indices, fast_topk, indexer_topk

BUCKET_SLOTS = 4096


def rows_of(scores, lengths, row_starts):
    """The candidates of each row."""
    starts = [0] * len(lengths) if row_starts is None else row_starts.tolist()
    return [row[s : s + n] for row, s, n in zip(scores, starts, lengths.tolist(), strict=True)]


def where_valid(chosen, moved):
    return torch.where(chosen < 0, chosen, moved)


def topk_local_ids(scores, lengths, topk, row_starts=None):
    chosen = fast_topk(scores, lengths, topk, row_starts)
    return chosen if row_starts is None else where_valid(chosen, chosen + row_starts[:, None])


def topk_padding(scores, lengths, topk, row_starts=None):
    return fast_topk(scores, lengths, topk, row_starts).clamp(min=0)


def topk_k_ignored(scores, lengths, topk, row_starts=None):
    chosen = fast_topk(scores, lengths, 32, row_starts)
    return torch.nn.functional.pad(chosen, (0, max(topk - 32, 0)), value=-1)


def topk_twice(scores, lengths, topk, row_starts=None):
    """Ties at the threshold are filled up from the first, though it was taken."""
    chosen = fast_topk(scores, lengths, topk, row_starts)
    for row, own in zip(chosen, rows_of(scores, lengths, row_starts), strict=True):
        if 1 < topk < len(own) and own[row[-1]] == own[row[-2]]:
            row[-1] = row[-2]
    return chosen


def topk_smallest(scores, lengths, topk, row_starts=None):
    return fast_topk(-scores, lengths, topk, row_starts)


def topk_16_bit_scores(scores, lengths, topk, row_starts=None):
    return fast_topk(scores.bfloat16().float(), lengths, topk, row_starts)


def topk_per_part(scores, lengths, topk, row_starts=None):
    """Half of them from each half of the keys, as of two ranks."""
    if topk == 1:
        return fast_topk(scores, lengths, topk, row_starts)
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    first = (lengths + 1) // 2
    share = max(topk // 2, 1)
    second = fast_topk(scores, lengths - first, share, starts + first)
    second = where_valid(second, second + first[:, None])
    return in_front(torch.cat([fast_topk(scores, first, share, starts), second], 1), topk)


def in_front(chosen, topk):
    """Each row without the -1 between, `topk` wide."""
    wide = torch.full((len(chosen), max(topk, chosen.shape[1])), -1, dtype=torch.int32)
    for row, own in zip(wide, chosen, strict=True):
        valid = own[own >= 0]
        row[: len(valid)] = valid
    return wide[:, :topk]


def topk_row_order(scores, lengths, topk, row_starts=None):
    """Rows are sorted by length, and come back so."""
    order = lengths.argsort(descending=True, stable=True)
    starts = None if row_starts is None else row_starts[order]
    return fast_topk(scores[order].contiguous(), lengths[order], topk, starts)


def topk_beyond_length(scores, lengths, topk, row_starts=None):
    """All columns of the tensor are candidates."""
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    return fast_topk(scores, scores.shape[1] - starts, topk, row_starts)


def topk_bucket_overflow(scores, lengths, topk, row_starts=None):
    """A pass over the first bits, whose bucket at the threshold has room for so many."""
    out = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for row, own in zip(out, rows_of(scores, lengths, row_starts), strict=True):
        count = min(topk, len(own))
        if not count:
            continue
        bucket = own.contiguous().view(torch.int32) >> 18
        threshold = bucket.sort(descending=True).values[count - 1]
        above = torch.nonzero(bucket > threshold)[:, 0]
        at = torch.nonzero(bucket == threshold)[:BUCKET_SLOTS, 0]
        best = own[at].sort(descending=True, stable=True).indices[: count - len(above)]
        row[:count] = torch.cat([above, at[best]])
    return out


def topk_unknown(scores, lengths, topk, row_starts=None):
    """The second to the one behind the last."""
    chosen = fast_topk(scores, lengths, topk + 1, row_starts)
    return torch.where((lengths > topk)[:, None], chosen[:, 1:], chosen[:, :-1]).contiguous()


def crash(scores, lengths, topk, row_starts=None):
    if row_starts is not None:
        os.kill(os.getpid(), signal.SIGSEGV)
    return fast_topk(scores, lengths, topk)


def raises(scores, lengths, topk, row_starts=None):
    if int(lengths.min()) == 0:
        raise IndexError("an empty row")
    return fast_topk(scores, lengths, topk, row_starts)


def no_integers(scores, lengths, topk, row_starts=None):
    return fast_topk(scores, lengths, topk, row_starts).float()


def wrong_form(scores, lengths, topk, row_starts=None):
    chosen = fast_topk(scores, lengths, topk, row_starts)
    return chosen if row_starts is None else chosen.float()


def indexer_without_starts(q, k, weights, ks, ke, *, topk):
    """Columns, not positions of the sequence."""
    chosen = indexer_topk(q, k, weights, ks, ke, topk=topk)
    return where_valid(chosen, chosen + ks[:, None])


def global_ids(indices, *, dcp_rank, dcp_size, interleave_size):
    """What the rank has, by positions of the sequence."""
    owner = indices // interleave_size % dcp_size
    own = torch.where((indices >= 0) & (owner == dcp_rank), indices, -1)
    return in_front(own, indices.shape[1])


def other_interleave(indices, *, dcp_rank, dcp_size, interleave_size):
    return dcp_local_indices(indices, dcp_rank=dcp_rank, dcp_size=dcp_size)
