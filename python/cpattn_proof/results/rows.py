# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks as one batch of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..conformance.cases import Batch, Case
from ..conformance.numbers import EPS, Array
from ..findings import Finding, NotUsable

MOST_SCORES = 2**24  # of all heads, in float64 several times; more would take gigabytes


@dataclass(frozen=True)
class Record:
    """Rows of one rank at one call of `expect`, in float32 unless they are integers.

    Attributes
    ----------
    site : str
        Line of the call.
    out, q, k, v : [rows, heads, dim]
    lse, sinks : [rows, heads] and [heads], or None
    places, key_places : int [rows, 2]
        Sequence and position of each row of `q` and of `k`; position -1 is padding.
    dtype : str
        Dtype of `q`.
    options : dict
        ``causal``, ``window``, ``scale``, ``softcap``.
    """

    site: str
    out: Array
    q: Array
    k: Array
    v: Array
    lse: Array | None
    sinks: Array | None
    places: Array
    key_places: Array
    dtype: str
    options: dict[str, Any]


class Rows(NamedTuple):
    """Batch of whole sequences, with the rank and the result of each row."""

    batch: Batch
    out: Array  # NaN in rows that no rank has
    lse: Array | None
    has: Array  # [rows], whether a rank has it
    rank: Array  # [rows], -1 for none
    row: Array  # [rows], the row of that rank
    place: Array  # [rows, 2], sequence and position
    key_rank: list[Array]  # rank of each key, for each sequence; -1 if all ranks have it
    site: str


class _Table(NamedTuple):
    """Rows of all ranks by sequence and position."""

    rank: Array
    row: Array
    place: Array

    @classmethod
    def of(cls, places: Sequence[Array], only: int | None = None) -> _Table:
        """Collect the rows of all ranks, or of one rank, without padding."""
        known = [np.flatnonzero(place[:, 1] >= 0) for place in places]
        if only is not None:
            known = [rows if rank == only else rows[:0] for rank, rows in enumerate(known)]
        rank = np.repeat(np.arange(len(places)), [len(rows) for rows in known])
        place = np.concatenate([place[rows] for place, rows in zip(places, known, strict=True)])
        order = np.lexsort((rank, place[:, 1], place[:, 0]))
        return cls(rank[order], np.concatenate(known)[order], place[order])

    def fault(self, what: str, first: str) -> Finding | None:
        """Return a position with several rows, or a missing position of a sequence.

        Sequences begin with position 0, or, with `first` "given", anywhere.
        """
        sequence, position = self.place.T
        same = (np.diff(sequence) == 0) & (np.diff(position) == 0)
        if same.any():
            at = int(np.flatnonzero(same)[0])
            ranks = np.unique(self.rank[(self.place == self.place[at]).all(axis=1)])
            who = (
                f"ranks {', '.join(map(str, ranks))}"
                if len(ranks) > 1
                else f"rank {ranks[0]}, twice"
            )
            rest = f", and {int(same.sum()) - 1} more positions" if same.sum() > 1 else ""
            return self._finding(f"{what} of {self._name(at)} are on {who}{rest}", at, ranks)
        begins = np.concatenate([[True], np.diff(sequence) != 0])[: len(sequence)]
        gap = np.diff(position, prepend=-1) > 1
        gap[begins] = position[begins] > 0 if first == "zero" else False
        if not gap.any():
            return None
        at = int(np.flatnonzero(gap)[0])
        lost = 0 if begins[at] else int(position[at - 1]) + 1
        name = f"position {lost} of sequence {sequence[at]}"
        return Finding(
            "OWN", f"{what} of {name} are on no rank, up to position {position[at] - 1}",
            where=name, kind="own-token", details={"sequence": int(sequence[at]), "position": lost},
        )  # fmt: skip

    def _name(self, at: int) -> str:
        return f"position {self.place[at, 1]} of sequence {self.place[at, 0]}"

    def _finding(self, what: str, at: int, ranks: Array) -> Finding:
        sequence, position = map(int, self.place[at])
        return Finding(
            "OWN", what, where=self._name(at), ranks=tuple(map(int, ranks)), kind="own-token",
            details={"sequence": sequence, "position": position},
        )  # fmt: skip


def together(records: Sequence[Record]) -> list[Rows] | Finding:
    """Join the rows of all ranks, or name a position without a single owner.

    If every rank has all queries, as in decoding, the rows of each rank are a batch.
    """
    _check_alike(records)
    places = [record.places for record in records]
    key_places = [record.key_places for record in records]
    shared = _all_alike(key_places)
    keys = _Table.of(key_places, 0 if shared else None)
    ranks = range(len(records)) if _all_alike(places) else (None,)
    found = []
    for only in ranks:
        queries = _Table.of(places, only)
        if not len(queries.rank) or not len(keys.rank):
            raise NotUsable("expect: rows of q and k must be some, of any rank, got none")
        for table, what, first in ((keys, "keys", "zero"), (queries, "queries", "given")):
            if fault := table.fault(what, first):
                return fault
        found.append(_laid_out(records, queries, keys, shared))
    return found


def _all_alike(places: Sequence[Array]) -> bool:
    """Tell whether each of several ranks has all rows."""
    sets = [np.unique(place[place[:, 1] >= 0], axis=0) for place in places]
    return len(sets) > 1 and all(np.array_equal(sets[0], one) for one in sets)


def _check_alike(records: Sequence[Record]) -> None:
    first = records[0]
    for rank, record in enumerate(records):
        for name, one, other in (
            ("options", first.options, record.options),
            ("dtype of q", first.dtype, record.dtype),
            ("heads and head_dim of q", first.q.shape[1:], record.q.shape[1:]),
            ("heads and head_dim of k", first.k.shape[1:], record.k.shape[1:]),
            ("heads and head_dim of v", first.v.shape[1:], record.v.shape[1:]),
            ("lse", first.lse is None, record.lse is None),
        ):
            if one != other:
                raise NotUsable(
                    f"expect: {name} must be the same on all ranks, got {one} on rank 0 and "
                    f"{other} on rank {rank}"
                )


def _laid_out(records: Sequence[Record], queries: _Table, keys: _Table, shared: bool) -> Rows:
    k, v = (_gathered(records, keys, name) for name in ("k", "v"))
    sequences = np.unique(queries.place[:, 0])
    kv_lens, q_lens, slots, key_rank, places = [], [], [], [], []
    for sequence in sequences:
        own = np.flatnonzero(keys.place[:, 0] == sequence)
        wanted = queries.place[queries.place[:, 0] == sequence, 1]
        kv_len = len(own)
        if wanted[-1] >= kv_len:
            raise NotUsable(
                f"expect: positions of sequence {sequence} must have keys, got a query at "
                f"{wanted[-1]} and keys up to {kv_len - 1}"
            )
        kv_lens.append(kv_len)
        q_lens.append(kv_len - int(wanted[0]))
        slots.append(own)
        key_rank.append(np.where(shared, -1, keys.rank[own]))
        positions = np.arange(int(wanted[0]), kv_len)
        places.append(np.stack([np.full(len(positions), sequence), positions], axis=1))
    place = np.concatenate(places)
    first = records[0]
    num_heads = first.q.shape[1]
    scores = num_heads * sum(q * kv for q, kv in zip(q_lens, kv_lens, strict=True))
    if scores > MOST_SCORES:
        raise NotUsable(
            f"expect: rows times keys times heads must be at most {MOST_SCORES:,}, got {scores:,}: "
            "try shorter sequences or fewer heads"
        )
    # Rows without a rank come last, and are not compared.
    own = np.searchsorted(sequences, queries.place[:, 0])
    begins = np.cumsum([0, *q_lens[:-1]]) + np.array(q_lens) - np.array(kv_lens)
    at = begins[own] + queries.place[:, 1]
    has = np.zeros(len(place), bool)
    has[at] = True
    rank, row = np.full(len(place), -1), np.full(len(place), -1)
    rank[at], row[at] = queries.rank, queries.row

    def spread(name: str) -> Array:
        values = _gathered(records, queries, name)
        whole = np.zeros((len(place), *values.shape[1:]), values.dtype)
        whole[at] = values
        return whole

    case = Case(
        tuple(q_lens), tuple(kv_lens), num_heads, first.k.shape[1], first.q.shape[2],
        first.v.shape[2], first.dtype if first.dtype in EPS else "float32", "ragged",
        sinks=first.sinks is not None, **first.options,
    )  # fmt: skip
    table = np.zeros((len(sequences), 0), np.int32)
    batch = Batch(case, spread("q"), k, v, tuple(slots), table, first.sinks, None)
    lse = None if first.lse is None else spread("lse").astype(np.float64)
    out = spread("out").astype(np.float64)
    return Rows(batch, out, lse, has, rank, row, place, key_rank, first.site)


def _gathered(records: Sequence[Record], table: _Table, name: str) -> Array:
    """Return rows of all ranks in the order of a table."""
    parts = [getattr(record, name) for record in records]
    begins = np.cumsum([0, *(len(part) for part in parts[:-1])])
    values: Array = np.concatenate(parts)[begins[table.rank] + table.row]
    return values
