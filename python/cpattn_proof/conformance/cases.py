# SPDX-License-Identifier: Apache-2.0
"""Batch to try an operator on: its description, and its memory.

A `Case` is a few numbers, so it can be printed, sent and made smaller. `make_batch` lays it out:
the seed gives every number that an operator may read; all other memory is NaN if the case is
poisoned.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from .numbers import Array, rounded

FAR_ELEMENTS = 2**31  # too many for signed 32-bit offsets
FAR_PAGES = 2**16  # too many for unsigned 16-bit page ids
SPARE_PAGES = 3  # pages of no sequence


class Told:
    """Dataclass of numbers that begins with two lengths, for people and programs."""

    far = 0  # a subclass may have it as a field

    def text(self) -> str:
        """Return the first two fields, and the others that differ from their defaults."""
        told = []
        for i, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if i < 2 or (value != field.default and field.name != "seed"):
                told.append(f"{field.name}={list(value) if isinstance(value, tuple) else value!r}")
        return ", ".join(told)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)  # type: ignore[call-overload]

    def extras(self) -> int:
        """Count the fields after the first two that differ from their defaults."""
        others = fields(self)[2:]  # type: ignore[arg-type]
        return sum(getattr(self, field.name) != field.default for field in others)


@dataclass(frozen=True)
class Features:
    """Cases that calls of a signature can express; others are not made.

    Attributes
    ----------
    layouts : tuple of {"paged", "ragged", "padded"}
        Possible places of keys.
    kv_layouts, page_sizes : tuple
        Layouts and sizes of pages.
    head_dims : tuple of int
        Dimensions of heads, 64 among them; `v_head_dim` tells whether values may have another.
    causal : tuple of bool
        Whether attention is possible with a causal mask, and without one.
    same_q_lens : bool
        Whether all sequences of a batch must have equally many new tokens, at least one.
    prefix, short_kv, empty : bool
        Sequences with cached tokens; with more queries than keys; rows that see no key.
    groups : bool
        Query heads that share KV heads.
    window, window_without_causal, window_right : bool
        Windows before a query's own key; also without a causal mask; then with a right side.
    alibi, softcap, sinks, v_head_dim, lse, pad_rows, append : bool
        Whether these arguments or results exist; see `Case`.
    alibi_lse : bool
        Whether to check the log-sum-exp with `alibi`, too.
    far : bool
        Whether caches may be so large that page ids exceed 16 bits, and offsets 31 bits.
    poison : bool
        Whether hidden numbers may be NaN. A mask that is added to scores hides only finite keys.
    """

    layouts: tuple[str, ...] = ("paged",)
    kv_layouts: tuple[str, ...] = ("NHD",)
    page_sizes: tuple[int, ...] = (4, 16, 64, 128)
    head_dims: tuple[int, ...] = (16, 32, 64)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    causal: tuple[bool, ...] = (True, False)
    same_q_lens: bool = False
    prefix: bool = True
    short_kv: bool = False
    empty: bool = True
    groups: bool = True
    window: bool = False
    window_without_causal: bool = False
    window_right: bool = False
    alibi: bool = False
    alibi_lse: bool = True
    softcap: bool = False
    sinks: bool = False
    v_head_dim: bool = False
    lse: bool = False
    pad_rows: bool = False
    append: bool = False
    far: bool = False
    poison: bool = True


@dataclass(frozen=True)
class Case(Told):
    """One call.

    Attributes
    ----------
    q_lens, kv_lens : tuple of int
        New tokens, and all tokens, of each sequence.
    layout : {"paged", "ragged", "padded"}
        Place of keys: in pages, sequence after sequence, or in a batch of the longest length.
    window, window_right, softcap
        Number of visible keys before and after a query's own; softcap. None and 0 for none.
    alibi : bool
        Whether slopes times distances are subtracted from scores, after softcap.
    values : {"normal", "one_hot", "even"}
        Random numbers; values with a single 1, under queries that look for one key; or values
        between 1 and 2 under nearly equal weights.
    pad_rows : int
        Rows of q after those of all sequences.
    far : {0, 16, 31}
        Bits that ids of pages (16) or offsets (31) exceed.
    append : bool
        Whether new keys are passed beside the cache.
    poison : bool
        Whether memory that must not be read is NaN; else it is finite.
    """

    q_lens: tuple[int, ...] = (3,)
    kv_lens: tuple[int, ...] = (3,)
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: str = "float32"
    layout: str = "paged"
    kv_layout: str = "NHD"
    page_size: int = 4
    causal: bool = True
    window: int | None = None
    window_right: int | None = None  # 0 if causal
    alibi: bool = False
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.25
    values: str = "normal"
    pad_rows: int = 0
    far: int = 0
    append: bool = False
    poison: bool = False
    seed: int = 0

    @property
    def size(self) -> int:
        """Return a measure of how much a person has to look at."""
        pairs = sum((q + 1) * (kv + 1) for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return pairs * self.num_heads + 8 * self.extras() + 4 * len(self.q_lens)


@dataclass(frozen=True)
class Batch:
    """Case in memory. Arrays are float32, with values of the case's dtype.

    Attributes
    ----------
    q : [sum(q_lens) + pad_rows, num_heads, head_dim]
    k, v : [slots, num_kv_heads, dim]
        Whole memory; `slots` has the places of tokens.
    slots : tuple of int arrays
        Slots of the tokens of each sequence, and of what follows them in its memory.
    block_tables : [batch, pages]
        For "paged"; entries beyond a sequence's pages are a page of no sequence.
    sinks, slopes : [num_heads] or None
    """

    case: Case
    q: Array
    k: Array
    v: Array
    slots: tuple[Array, ...]
    block_tables: Array
    sinks: Array | None
    slopes: Array | None

    @cached_property
    def q_starts(self) -> Array:
        """Begin row of each sequence, and end of the last."""
        return np.concatenate([[0], np.cumsum(self.case.q_lens)]).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        """Number of rows that belong to sequences."""
        return sum(self.case.q_lens)

    def tokens_of(self, memory: Array, sequence: int) -> Array:
        """Return the rows of a sequence in `k` or `v`."""
        return memory[self.slots[sequence][: self.case.kv_lens[sequence]]]


def make_batch(case: Case) -> Batch:
    """Lay a case out in memory."""
    rng = np.random.default_rng(case.seed)
    table, slots, num_slots = _place(case, rng)
    q, k, v = (
        rng.standard_normal((rows, heads, dim))
        for rows, heads, dim in (
            (sum(case.q_lens) + case.pad_rows, case.num_heads, case.head_dim),
            (num_slots, case.num_kv_heads, case.head_dim),
            (num_slots, case.num_kv_heads, case.v_head_dim),
        )
    )
    if case.values == "even":
        q, v = q / 8, 1 + np.abs(np.modf(v)[0])
    if case.values == "one_hot":
        _look_for_one(case, q, k, v, slots, rng)
    if case.poison:
        read = np.zeros(num_slots, bool)
        for own, kv_len in zip(slots, case.kv_lens, strict=True):
            read[own[:kv_len]] = True
        k[~read] = v[~read] = np.nan
        q[sum(case.q_lens) :] = np.nan
    sinks = rounded(1 + rng.standard_normal(case.num_heads), "float32") if case.sinks else None
    slopes = rounded(0.1 + rng.random(case.num_heads), "float32") if case.alibi else None
    q, k, v = (rounded(x, case.dtype) for x in (q, k, v))
    return Batch(case, q, k, v, slots, table, sinks, slopes)


def _place(case: Case, rng: np.random.Generator) -> tuple[Array, tuple[Array, ...], int]:
    """Return block tables, the slots of each sequence, and the number of slots."""
    if case.layout == "paged":
        counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
        num_pages = sum(counts) + SPARE_PAGES
        ids = rng.permutation(num_pages)
        table = np.full((len(counts), max(counts) + 1), ids[-1], np.int32)
        ends = np.cumsum([0, *counts])
        for row, begin, end in zip(table, ends[:-1], ends[1:], strict=True):
            row[: end - begin] = ids[begin:end]
        within = np.arange(case.page_size)
        slots = tuple((row[:, None] * case.page_size + within).ravel() for row in table)
        return table, slots, num_pages * case.page_size
    none = np.zeros((len(case.kv_lens), 0), np.int32)
    if case.layout == "padded":
        longest = max(case.kv_lens) + (2 if case.poison else 0)
        slots = tuple(s * longest + np.arange(longest) for s in range(len(case.kv_lens)))
        return none, slots, longest * len(case.kv_lens)
    num_slots = sum(case.kv_lens) + SPARE_PAGES
    starts = np.cumsum([0, *case.kv_lens[:-1]])
    return none, tuple(np.arange(start, num_slots) for start in starts), num_slots


def _look_for_one(
    case: Case, q: Array, k: Array, v: Array, slots: tuple[Array, ...], rng: np.random.Generator
) -> None:
    """Make each query look for one visible key, clearly the best; the values tell which."""
    k[:] = np.sign(k)
    v[:] = 0
    row, group = 0, case.num_heads // case.num_kv_heads
    for own, q_len, kv_len in zip(slots, case.q_lens, case.kv_lens, strict=True):
        within = np.arange(len(own))
        v[own, :, within % case.v_head_dim] = 1
        for i in range(q_len):
            right = 0 if case.causal else case.window_right
            last = kv_len - 1 if right is None else min(kv_len - q_len + i + right, kv_len - 1)
            if last >= 0:
                first = 0 if case.window is None else max(0, last - case.window)
                target = own[rng.integers(first, last + 1)]
                q[row] = np.repeat(k[target], group, axis=0) / case.scale
            row += 1
