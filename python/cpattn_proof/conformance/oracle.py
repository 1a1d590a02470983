# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 that can be wrong in known ways.

The correct oracle equals `cpattn.reference.paged_attention` and shares no code with it or any
kernel. Each field of `Switches` is one possible deviation of an operator; a fault is a combination
of few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .cases import Batch, Case
from .memory import Reading, keys_of, reading_of
from .numbers import Array, rounded
from .switches import RIGHT, Switches


class Attended(NamedTuple):
    """Results of attention, with the units of their errors; rows are those of sequences."""

    out: Array  # [rows, heads, v_head_dim]
    lse: Array  # [rows, heads], natural logarithm; -inf for a row that sees no key
    magnitude: Array  # sum_j w_j |v_j|, in the shape of out
    score_size: Array  # largest |q| |k| scale of a row, in the shape of lse
    num_keys: Array  # number of keys that a row sees, [rows, 1]


#: Keys of each part to merge, each [keys] or [rows, keys].
Parts: TypeAlias = Sequence[Array]


def attend(
    batch: Batch, switches: Switches = RIGHT, parts: Sequence[Parts] | None = None
) -> Attended:
    """Attend over a batch; `parts` of each sequence replace those of `switches`."""
    sequences = [
        _sequence(batch, s, switches, None if parts is None else parts[s])
        for s in range(len(batch.case.q_lens))
    ]
    return Attended(*(np.concatenate(x) for x in zip(*sequences, strict=True)))


def _sequence(batch: Batch, sequence: int, switches: Switches, given: Parts | None) -> Attended:
    case, reading = batch.case, reading_of(batch, sequence, switches)
    rows = slice(batch.q_starts[sequence], batch.q_starts[sequence + 1])
    q = batch.q[rows].astype(np.float64)
    k, v = keys_of(batch, reading, switches)
    heads = _kv_heads(case.num_heads, case.num_kv_heads, switches)
    k, v = k[:, heads], v[:, heads]
    products = _matmul(q, k.transpose(1, 2, 0))
    sees: Array = visible(len(q), reading, case, switches)
    with np.errstate(invalid="ignore", over="ignore"):
        biases = _alibi(len(q), reading, batch, switches)
        if switches.alibi == "before scale":
            scores = _capped(products + biases, case, switches)
        else:
            scores = _capped(products, case, switches) + biases
        keys = _parts(reading, case, switches) if given is None else given
        parts = [_part(scores, products, sees & part, v, batch, switches) for part in keys]
        padded = case.layout == "padded" and max(case.kv_lens) > 1  # so that no half is empty
        filled = [bool(part.any()) or padded for part in keys]
        out, lse, magnitude = _merged(parts, switches, filled)
        score_size = np.linalg.norm(q, axis=-1) * case.scale * _longest(k)
        score_size = score_size + np.where(sees[:, None], -biases, 0).max(axis=-1, initial=0)
    if switches.zero_times_nan:
        hidden = np.isnan(v).sum(axis=0) > 0
        out = np.where(hidden[None], np.nan, out)
    empty = (sees.sum(axis=1) == 0)[:, None, None]
    if switches.empty == "nan":
        out = np.where(empty, np.nan, out)
    if switches.empty == "mean" and len(v) and batch.sinks is None:
        out = np.where(empty, v.mean(axis=0), out)
        magnitude = np.where(empty, np.abs(v).mean(axis=0), magnitude)
    return Attended(out, lse, magnitude, score_size, sees.sum(axis=1, keepdims=True))


def visible(num_rows: int, reading: Reading, case: Case, switches: Switches) -> Array:
    """Return which of the keys each row sees, [rows, keys]."""
    row = np.arange(num_rows)[:, None]
    end, prefix = reading.end_of_queries, reading.end_of_queries - reading.q_len
    within = row % switches.chunk if switches.chunk else row
    rows_of_chunk = np.minimum(switches.chunk, num_rows - row + within)
    position = {
        "": row + (0 if switches.mask == "top left" else prefix), "top left": within,
        "bottom right": within + end - rows_of_chunk, "prefix": within + prefix,
        "own keys": row + prefix,
    }[switches.chunk_mask]  # fmt: skip
    key = reading.positions[None, :]
    sees = np.broadcast_to(reading.is_key, (num_rows, len(reading.positions)))
    if case.causal and switches.mask != "none":
        sees = sees & (key <= position + switches.mask_shift)
    if case.causal and switches.chunk_mask == "own keys":
        sees = sees & (key >= position - within)
    if case.window is not None and switches.window:
        first = position - case.window + switches.window_shift
        block = case.page_size if switches.window_block == "page" else switches.window_block
        sees = sees & (key >= (first // int(block) * int(block) if block else first))
    if case.window_right is not None and switches.window and switches.window_right:
        sees = sees & (key <= position + case.window_right - switches.window_right_shift)
    return sees


def _alibi(num_rows: int, reading: Reading, batch: Batch, switches: Switches) -> Array:
    """Return the bias of scores, [rows, heads, keys]."""
    if batch.slopes is None or switches.alibi == "none":
        return np.zeros((num_rows, 1, len(reading.positions)))
    first = 0 if switches.alibi == "top left" else reading.end_of_queries - reading.q_len
    position = first + np.arange(num_rows)[:, None, None]
    return -batch.slopes[:, None].astype(np.float64) * np.abs(reading.positions - position)


def _kv_heads(num_heads: int, num_kv_heads: int, switches: Switches) -> Array:
    """Return the KV head of each query head."""
    heads = np.arange(num_heads)
    if switches.heads == "strided":
        return heads % num_kv_heads
    return heads // (num_heads // num_kv_heads)


def _capped(products: Array, case: Case, switches: Switches) -> Array:
    scale, softcap = case.scale, case.softcap
    factor = {
        "given": scale, "none": 1.0, "twice": scale * scale, "root": 1 / math.sqrt(case.head_dim)
    }[switches.scale]  # fmt: skip
    if softcap == 0 or switches.softcap == "none":
        return products * factor
    if switches.softcap == "before scale":
        return softcap * np.tanh(products / softcap) * factor
    return softcap * np.tanh(products * factor / softcap)


def _parts(reading: Reading, case: Case, switches: Switches) -> list[Array]:
    """Return the keys of each part to merge; a single part has all keys."""
    positions, total = reading.positions, reading.end_of_queries
    if switches.split is None:
        return [np.ones(len(positions), bool)]
    if switches.split in ("new", "half"):
        longest = max(case.kv_lens) if case.layout == "padded" else total
        cut = total - reading.q_len if switches.split == "new" else longest // 2
        return [positions < cut, positions >= cut]
    size = case.page_size if switches.split == "page" else int(switches.split)
    count = max(1, -(-total // size))
    return [(positions >= i * size) & (positions < (i + 1) * size) for i in range(count)]


def _part(
    scores: Array, products: Array, sees: Array, v: Array, batch: Batch, switches: Switches
) -> tuple[Array, Array, Array]:
    """Return out, LSE and magnitude of attention over visible keys."""
    seen = np.where(sees[:, None, :], scores, -np.inf)
    most = seen.max(axis=-1, initial=-np.inf)
    if batch.sinks is not None and switches.sinks != "none":
        top = np.maximum(most, batch.sinks)
    else:
        top = most
    shift = np.where(np.isfinite(top) | np.isnan(top), top, 0)
    weights = np.exp(seen - shift[..., None])
    total = weights.sum(axis=-1)
    lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + shift, -np.inf)
    lse = np.where(np.isnan(total), np.nan, lse)
    denominator = total
    if batch.sinks is not None and switches.sinks != "none":
        denominator = total + switches.sink_count * np.exp(batch.sinks - shift)
    with_sink = np.log(np.where(denominator > 0, denominator, 1)) + shift
    lse = _lse_as(lse, with_sink, products, sees, batch, switches)
    share = weights / np.where(denominator == 0, 1, denominator)[..., None]
    out = _weighted(share, v, sees, switches.accumulator)
    return out, lse, _mixed(np.nan_to_num(share), np.abs(np.nan_to_num(v)))


def _weighted(share: Array, v: Array, sees: Array, accumulator: str | None) -> Array:
    """Return the weighted sum of values; NaN in hidden values has no effect."""
    if accumulator is not None:
        total = np.zeros((*share.shape[:2], v.shape[-1]))
        for j in range(len(v)):
            total = rounded(total + share[..., j, None] * np.nan_to_num(v[j]), accumulator)
        return total.astype(np.float64)
    out = _mixed(share, np.nan_to_num(v))
    if np.isnan(v).any():
        seen = np.broadcast_to(sees[:, None, :], share.shape).astype(np.float64)
        bad = _mixed(seen, np.isnan(v).astype(np.float64))
        out = np.where(bad > 0, np.nan, out)
    return out


def _matmul(rows: Array, matrices: Array) -> Array:
    """Multiply [rows, heads, n] by [heads, n, m], head by head.

    BLAS is avoided: its threads wait for each other without sleeping, so on a busy machine these
    small products take ten times as long as on one thread.
    """
    product: Array = np.einsum("qhn,hnm->qhm", rows, np.ascontiguousarray(matrices))
    return product


def _mixed(share: Array, v: Array) -> Array:
    """Multiply [rows, heads, keys] by [keys, heads, dim]."""
    return _matmul(share, v.swapaxes(0, 1))


def _lse_as(
    lse: Array, with_sink: Array, products: Array, sees: Array, batch: Batch, switches: Switches
) -> Array:
    """Return the log-sum-exp that an operator with these switches returns."""
    if switches.lse == "with sink" and batch.sinks is not None:
        return with_sink
    if switches.lse in ("unscaled", "unscaled maximum"):
        raw = np.where(sees[:, None, :], products, -np.inf)
        most = raw.max(axis=-1, initial=-np.inf)
        shift = np.where(np.isfinite(most), most, 0)
        if switches.lse == "unscaled maximum":
            return lse + shift * (1 - batch.case.scale)
        total = np.exp(raw - shift[..., None]).sum(axis=-1)
        return np.where(total > 0, np.log(np.where(total > 0, total, 1)) + shift, -np.inf)
    if switches.lse == "nan on empty":
        return np.where(np.isneginf(lse), np.nan, lse)
    return lse * switches.lse_factor


def _merged(
    parts: list[tuple[Array, Array, Array]], switches: Switches, filled: list[bool]
) -> tuple[Array, Array, Array]:
    """Merge parts weighted by their LSE, to any base; a single part is unchanged."""
    if len(parts) == 1:
        return parts[0]
    outs, lses, magnitudes = (np.stack(x) for x in zip(*parts, strict=True))
    exponents = lses * switches.merge_factor
    top = exponents.max(axis=0)
    shift = np.where(np.isfinite(top), top, 0)
    weights = np.exp(exponents - shift)
    total = weights.sum(axis=0)
    share = weights / np.where(total == 0, 1, total)
    if switches.merge_swapped:
        share = _swapped(weights)
    out = np.einsum("pqh,pqhd->qhd", share, outs)
    magnitude = np.einsum("pqh,pqhd->qhd", np.nan_to_num(share), magnitudes)
    lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + shift, -np.inf)
    if switches.nan_of_empty_part:
        empty = np.isneginf(lses)
        lost = {
            "some": empty.any(axis=0) & ~empty.all(axis=0), "any": empty.any(axis=0),
            "first": empty[0], "later": empty[1:].any(axis=0),
            "masked": (empty & np.array(filled)[:, None, None]).any(axis=0),
        }[switches.nan_of_empty_part]  # fmt: skip
        out, lse = np.where(lost[..., None], np.nan, out), np.where(lost, np.nan, lse)
    return out, lse / switches.merge_factor, magnitude


def _swapped(weights: Array) -> Array:
    """Return shares of parts, [parts, rows, heads], if each merge swaps its two weights."""
    shares = np.zeros_like(weights)
    shares[0], total = 1, weights[0]
    for i in range(1, len(weights)):
        both = total + weights[i]
        known = np.where(both == 0, 1, both)
        shares[:i] *= weights[i] / known
        shares[i], total = total / known, both
    return shares


def _longest(k: Array) -> Array:
    """Return the length of the longest key of each head, ignoring NaN."""
    lengths = np.nan_to_num(np.linalg.norm(k, axis=-1))
    longest: Array = lengths.max(axis=0, initial=0.0)
    return longest
