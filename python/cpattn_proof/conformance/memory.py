# SPDX-License-Identifier: Apache-2.0
"""Memory read as the keys of a sequence, correctly or not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cases import Batch
from .numbers import Array
from .switches import Switches


class Reading(NamedTuple):
    """Keys of a sequence, as an operator reads them.

    Attributes
    ----------
    slots : [keys]
        Slots that are read.
    positions : [keys]
        Positions in the sequence.
    is_key : [keys]
        False for slots that are read but never counted.
    q_len, end_of_queries : int
        New tokens, and the position after the last of them.
    """

    slots: Array
    positions: Array
    is_key: Array
    q_len: int
    end_of_queries: int


def reading_of(batch: Batch, sequence: int, switches: Switches) -> Reading:
    """Return the slots that are read for a sequence."""
    case = batch.case
    owner = owner_of(sequence, switches.order, case.kv_lens)
    lengths_of = owner if switches.order.endswith("with lengths") else sequence
    q_len, kv_len = case.q_lens[sequence], case.kv_lens[lengths_of]
    own = _slots(batch, owner, switches)
    end, begin = kv_len, 0
    end_of_queries = kv_len
    match switches.lengths:
        case "without new":
            end = max(kv_len - q_len, 0)
        case "without new, aligned":
            end = end_of_queries = max(kv_len - q_len, 0)
        case "first":
            end = end_of_queries = min(q_len, kv_len)
        case "last":
            begin = max(kv_len - q_len, 0)
    end += _pads(batch, sequence) if switches.pads == "keys" else 0
    last = end + _beyond(end, case.page_size, len(own), switches.beyond)
    last = min(last, len(own))
    if switches.beyond_aligned or switches.pads == "keys":
        end_of_queries = last
    only_read = switches.zero_times_nan or switches.empty == "mean"
    counted = last if switches.beyond and not only_read else min(end, len(own))
    if switches.pads == "queries":
        q_len += _pads(batch, sequence)
    position = np.arange(begin, last)
    return Reading(own[begin:last], position, position < counted, q_len, end_of_queries)


def _pads(batch: Batch, sequence: int) -> int:
    """Return the padding rows after a sequence."""
    return batch.case.pad_rows if sequence == len(batch.case.q_lens) - 1 else 0


def _beyond(end: int, page_size: int, capacity: int, beyond: str) -> int:
    """Return how many slots after the last key are read."""
    return {"": 0, "one": 1, "page": -end % page_size, "all": max(capacity - end, 0)}[beyond]


def owner_of(sequence: int, order: str, lengths: tuple[int, ...]) -> int:
    """Return the sequence whose keys are read."""
    count = len(lengths)
    if order.startswith("reversed"):
        return count - 1 - sequence
    if order.startswith("rolled"):
        return (sequence + 1) % count
    if order.startswith("longest first"):
        return int(np.argsort(-np.asarray(lengths), kind="stable")[sequence])
    return sequence


def _slots(batch: Batch, sequence: int, switches: Switches) -> Array:
    """Return the slots read for the tokens of a sequence, up to the end of its memory."""
    case, own = batch.case, batch.slots[sequence]
    if case.layout != "paged":
        return own
    pages = batch.block_tables[sequence].astype(np.int64)
    used = -(-case.kv_lens[sequence] // case.page_size)
    match switches.table:
        case "ignored":
            before = sum(-(-kv_len // case.page_size) for kv_len in case.kv_lens[:sequence])
            pages = np.arange(before, before + len(pages))
        case "sorted":
            pages = np.concatenate([np.sort(pages[:used]), pages[used:]])
        case "reversed":
            pages = np.concatenate([pages[:used][::-1], pages[used:]])
        case "first page alone":
            pages = pages[:1] + np.arange(len(pages))
    size = _page_size(case.page_size, switches.page_size)
    stride = case.page_size if switches.page_stride == "true" else size
    token = np.arange(len(own))
    page = pages[np.minimum(token // size, len(pages) - 1)]
    slots: Array = np.clip(page * stride + token % size, 0, len(batch.k) - 1)
    return slots


def _page_size(true_size: int, taken: str) -> int:
    match taken:
        case "right":
            return true_size
        case "half":
            return max(true_size // 2, 1)
        case "double":
            return 2 * true_size
    return int(taken)


def keys_of(batch: Batch, reading: Reading, switches: Switches) -> tuple[Array, Array]:
    """Return keys and values of a reading, in float64."""
    case = batch.case
    k, v = batch.k, batch.v
    if switches.layout == "swapped" and case.layout == "paged":
        k, v = (_other_layout(x, case.page_size, case.kv_layout) for x in (k, v))
    slots = reading.slots
    if switches.values == "of key dim":
        values = _by_dim(v, case.head_dim)[slots]
    elif switches.values == "padded to key dim":
        values = v[slots]
        shown = min(case.head_dim, case.v_head_dim)
        values = np.concatenate([values[..., :shown], np.zeros_like(values[..., shown:])], axis=-1)
    else:
        values = v[slots]
    return k[slots].astype(np.float64), values.astype(np.float64)


def _other_layout(memory: Array, page_size: int, kv_layout: str) -> Array:
    """Return slots as seen by a reader that confuses NHD and HND."""
    _, heads, dim = memory.shape
    pages = memory.reshape(-1, page_size, heads, dim)
    if kv_layout == "NHD":
        seen = pages.reshape(-1, heads, page_size, dim).swapaxes(1, 2)
    else:
        stored = np.ascontiguousarray(pages.swapaxes(1, 2))
        seen = stored.reshape(-1, page_size, heads, dim)
    return np.ascontiguousarray(seen).reshape(memory.shape)


def _by_dim(v: Array, dim: int) -> Array:
    """Return values as seen by a reader that steps by the dimension of keys."""
    slots, heads, width = v.shape
    flat = v.ravel()
    starts = (np.arange(slots * heads) * dim)[:, None] + np.arange(width)
    return flat[np.minimum(starts, len(flat) - 1)].reshape(slots, heads, width)
