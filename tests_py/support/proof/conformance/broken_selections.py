# SPDX-License-Identifier: Apache-2.0
"""Operators that select keys, each wrong in one way; operators on scores have the signature of
`cpattn.sparse.sglang_0_5_23.fast_topk`."""

import os
import signal
from functools import partial

import torch

from cpattn.sparse import dcp_local_indices, indexer_topk
from cpattn.sparse.sglang_0_5_23 import fast_topk

BUCKET_SLOTS = 4096


def operator_of(fault):
    return partial(_wrong, fault)


def topk_padding(scores, lengths, topk, row_starts=None):
    return _wrong("topk-padding", scores, lengths, topk, row_starts)


def _wrong(fault, scores, lengths, topk, row_starts=None):
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    if fault == "crash" and row_starts is not None:
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "raises" and int(lengths.min()) == 0:
        raise IndexError("an empty row")
    if fault == "topk-bucket-overflow":
        return _from_buckets(scores, lengths, topk, starts)
    match fault:
        case "topk-smallest":
            scores = -scores
        case "topk-16-bit-scores":
            scores = scores.bfloat16().float()
        case "topk-beyond-length":  # all columns of the tensor are candidates
            lengths = scores.shape[1] - starts
        case "topk-per-part" if topk > 1:  # half of the selection is from each half of the keys
            first, share = (lengths + 1) // 2, max(topk // 2, 1)
            second = fast_topk(scores, lengths - first, share, starts + first)
            second = _where_valid(second, second + first[:, None])
            return in_front(torch.cat([fast_topk(scores, first, share, starts), second], 1), topk)
        case "topk-row-order":  # rows are sorted by length, and returned in that order
            order = lengths.argsort(descending=True, stable=True)
            scores, lengths, starts = scores[order].contiguous(), lengths[order], starts[order]
        case "topk-unknown":  # the second best to one after the last
            chosen = fast_topk(scores, lengths, topk + 1, starts)
            more = (lengths > topk)[:, None]
            return torch.where(more, chosen[:, 1:], chosen[:, :-1]).contiguous()
    chosen = fast_topk(scores, lengths, 32 if fault == "topk-k-ignored" else topk, starts)
    match fault:
        case "topk-local-ids":
            chosen = _where_valid(chosen, chosen + starts[:, None])
        case "topk-padding":
            chosen = chosen.clamp(min=0)
        case "topk-lost-infinite":
            for row, own in zip(chosen, _rows_of(scores, lengths, starts), strict=True):
                kept = row[row >= 0][own[row[row >= 0]].isfinite()]
                row[:] = in_front(kept[None], topk)[0]
        case "topk-k-ignored":
            chosen = torch.nn.functional.pad(chosen, (0, max(topk - 32, 0)), value=-1)
        case "topk-twice":  # a tie at the threshold takes the same key again
            for row, own in zip(chosen, _rows_of(scores, lengths, starts), strict=True):
                if 1 < topk < len(own) and own[row[-1]] == own[row[-2]]:
                    row[-1] = row[-2]
        case "no-integers":
            chosen = chosen.float()
        case "wrong-form" if row_starts is not None:
            chosen = chosen.float()
    return chosen


def _rows_of(scores, lengths, starts):
    """Return the candidates of each row."""
    ends = (starts + lengths).tolist()
    return [row[s:end] for row, s, end in zip(scores, starts.tolist(), ends, strict=True)]


def _where_valid(chosen, moved):
    return torch.where(chosen < 0, chosen, moved)


def in_front(chosen, topk):
    """Return each row `topk` wide, with -1 only at its end."""
    wide = torch.full((len(chosen), max(topk, chosen.shape[1])), -1, dtype=torch.int32)
    for row, own in zip(wide, chosen, strict=True):
        valid = own[own >= 0]
        row[: len(valid)] = valid
    return wide[:, :topk]


def _from_buckets(scores, lengths, topk, starts):
    """Select by first bits; the bucket at the threshold has only BUCKET_SLOTS slots."""
    out = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for row, own in zip(out, _rows_of(scores, lengths, starts), strict=True):
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


def indexer_without_starts(q, k, weights, ks, ke, *, topk):
    """Return columns instead of positions in the sequence."""
    chosen = indexer_topk(q, k, weights, ks, ke, topk=topk)
    return _where_valid(chosen, chosen + ks[:, None])


def global_ids(indices, *, dcp_rank, dcp_size, interleave_size):
    """Return the rank's indices as positions of the sequence, not of the rank."""
    owner = indices // interleave_size % dcp_size
    own = torch.where((indices >= 0) & (owner == dcp_rank), indices, -1)
    return in_front(own, indices.shape[1])


def other_interleave(indices, *, dcp_rank, dcp_size, interleave_size):
    return dcp_local_indices(indices, dcp_rank=dcp_rank, dcp_size=dcp_size)
