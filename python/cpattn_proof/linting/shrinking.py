# SPDX-License-Identifier: Apache-2.0
"""Makes a document smaller while it still shows a fault.

The search drops requests, then parts that other invariants need, then the ends of sequences. Each
step keeps a correct plan correct: the rest of the document still fits together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..findings import NotUsable
from .intervals import Ints, each, ints, offsets
from .model import Absent

Document: TypeAlias = dict[str, Any]
MOST_TRIES = 60
MOST_WORK = 2**25  # tokens and other parts in all tried documents together

#: Parts that decide each invariant; other parts are dropped first.
_OF_RANKS = {
    "OWN": ("rows", "positions", "segments", "writes", "heads", "tables", "shard", "units"),
    "COV": ("rows", "segments", "shard", "units"),
    "LEN": ("rows", "segments", "shard", "key_lens", "tables"),
    "LSE": ("shard",),
    "SEQ": ("collectives",),
    "XFER": (),
    "LAYOUT": (),
    "TOPK": ("selections", "shard"),
    "ADDR": ("writes", "buffers", "products"),
    "PAD": ("rows", "segments", "writes", "shard"),
    "BAL": ("rows", "segments", "shard"),
}
_OF_DOCUMENTS = {
    "OWN": ("restore", "heads", "units"),
    "COV": ("units",),
    "LSE": ("merges",),
    "SEQ": ("groups",),
    "XFER": ("memories", "transfers"),
    "LAYOUT": ("layouts", "memories", "transfers"),
    "TOPK": ("topk",),
    "BAL": ("balance",),
}
_ALWAYS = ("schema", "name", "requests", "queries", "attention", "cache", "ranks")
_COLUMNS = ("rows", "segments", "writes", "selections", "units")


def shrunk(
    document: Mapping[str, Any], invariant: str, shows: Callable[[Document], bool]
) -> Document:
    """Return the smallest found document for which `shows` holds, starting with this one."""
    search = _Search(shows)
    small = search.better(dict(document), _without_parts(document, invariant))
    small = _without_requests(_without_more_parts(small, search), search)
    return _shortened(small, search)


class _Search:
    """Tries candidates within limits on their number and total size."""

    def __init__(self, shows: Callable[[Document], bool]) -> None:
        self._shows = shows
        self._left = MOST_TRIES
        self._work = MOST_WORK

    def better(self, now: Document, candidate: Document | None) -> Document:
        """Return the candidate if it shows the fault, else the present document."""
        return candidate if candidate is not None and self.holds(candidate) else now

    def allows(self, document: Document) -> bool:
        """Tell whether another document of this size may be made and tried."""
        return self._left > 0 and _work(document) <= self._work

    def holds(self, candidate: Document) -> bool:
        if not self.allows(candidate):
            return False
        self._left -= 1
        self._work -= _work(candidate)
        try:
            return self._shows(candidate)
        except (Absent, NotUsable):
            return False


def _work(document: Document) -> int:
    """Estimate the work of judging: tokens, and objects and lists by length."""
    requests, ranks = document.get("requests", ()), document.get("ranks", ())
    columns = [rank[part] for rank in ranks for part in (*_COLUMNS, "positions") if part in rank]
    tokens = sum(request["extend"] for request in requests)
    tokens += sum(sum(part.get("count", ())) for part in columns)
    parts = (
        len(requests)
        + sum(1 + len(rank) for rank in ranks)
        + sum(len(part["request"] if "request" in part else part["count"]) for part in columns)
    )
    return tokens + 100 * parts


def _without_parts(document: Mapping[str, Any], invariant: str) -> Document:
    kept = (*_ALWAYS, *_OF_DOCUMENTS.get(invariant, ()))
    small = {name: value for name, value in document.items() if name in kept}
    if "ranks" in small:
        wanted = _OF_RANKS[invariant]
        small["ranks"] = [
            {name: value for name, value in rank.items() if name in wanted}
            for rank in small["ranks"]
        ]
    return small


def _without_more_parts(document: Document, search: _Search) -> Document:
    """Leave out each part that the fault does not need, of the document and of all ranks."""
    ranks = document.get("ranks", [])
    for part in sorted({*document} - {*_ALWAYS}):
        rest = {name: value for name, value in document.items() if name != part}
        document = search.better(document, rest)
    for part in sorted({name for rank in ranks for name in rank}):
        without_it = [{n: v for n, v in rank.items() if n != part} for rank in document["ranks"]]
        document = search.better(document, document | {"ranks": without_it})
    return document


def _without_requests(document: Document, search: _Search) -> Document:
    """Leave out halves, quarters, ... of the requests, as long as some can be."""
    size = len(document.get("requests", ()))
    chunk = (size + 1) // 2
    while size > 1 and chunk:
        begin = 0
        while begin < size and size > 1:
            dropped = set(range(begin, min(begin + chunk, size)))
            allowed = len(dropped) < size and search.allows(document)
            allowed = allowed and not _is_shared(document, dropped)
            candidate = without(document, dropped) if allowed else None
            better = search.better(document, candidate)
            if better is document:
                begin += chunk
            document, size = better, len(better["requests"])
        chunk //= 2
    return document


def _is_shared(document: Document, dropped: set[int]) -> bool:
    """Return whether a remaining request shares a prefix with a dropped one."""
    return any(
        number not in dropped and request.get("shares", {}).get("request") in dropped
        for number, request in enumerate(document["requests"])
    )


def without(document: Document, dropped: set[int]) -> Document:
    """The document without some requests, the others numbered anew."""
    count = len(document["requests"])
    left = [number for number in range(count) if number not in dropped]
    new = {-1: -1} | {number: place for place, number in enumerate(left)}
    small = dict(document)
    small["requests"] = [_renamed(document["requests"][i], new) for i in left]
    moved = []
    if "ranks" in document:
        small["ranks"] = []
        for rank in document["ranks"]:
            part, rows = _rank_without(rank, left, new)
            small["ranks"].append(part)
            moved.append(rows)
    if "tables" in document.get("cache", {}):
        tables = document["cache"]["tables"]
        small["cache"] = document["cache"] | {"tables": [tables[i] for i in left]}
    if "restore" in document:
        small["restore"] = _restore_without(document["restore"], moved)
    if "merges" in document:
        known = [m for m in document["merges"] if m.get("request", -1) in new]
        small["merges"] = [_one_request(merge, new) for merge in known]
    if "scores" in document.get("topk", {}):
        known = [query for query in document["topk"]["scores"] if query["request"] in new]
        small["topk"] = document["topk"] | {"scores": [_one_request(q, new) for q in known]}
    return small


def _renamed(request: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    shares = request.get("shares")
    kept = {name: value for name, value in request.items() if name != "shares"}
    if shares and shares["request"] in new:
        kept["shares"] = shares | {"request": new[shares["request"]]}
    return kept


def _one_request(part: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    named = {"request": new[part["request"]]} if "request" in part else {}
    return dict(part) | named


def _rank_without(
    rank: Mapping[str, Any], left: list[int], new: Mapping[int, int]
) -> tuple[dict[str, Any], Ints]:
    """A rank's part, and where each of its rows is then, -1 for those that are gone."""
    small = dict(rank)
    rows = rank.get("rows", {"request": [], "count": []})
    count = ints(rows["count"])
    stays = np.repeat(np.isin(ints(rows["request"]), list(new)), count)
    places = np.where(stays, np.cumsum(stays) - 1, -1)
    before = offsets(stays.astype(np.int64))
    for part in _COLUMNS:
        if part in rank:
            keep = [i for i, owner in enumerate(rank[part]["request"]) if owner in new]
            small[part] = {k: [values[i] for i in keep] for k, values in rank[part].items()}
            small[part]["request"] = [new[owner] for owner in small[part]["request"]]
    if "segments" in small:
        limit = len(before) - 1
        small["segments"]["row"] = [int(before[min(r, limit)]) for r in small["segments"]["row"]]
    for part in ("tables", "key_lens"):
        if part in rank:
            small[part] = [rank[part][i] for i in left]
    if "positions" in rank:
        small["positions"] = _kept_positions(rank["positions"], stays)
    return small, places


def _expanded(runs: Mapping[str, Any], name: str) -> Ints:
    run, place = each(ints(runs["count"]))
    steps = ints(runs.get("step", np.ones(len(runs["count"]), np.int64)))
    return ints(runs[name])[run] + place * steps[run]


def _kept_positions(positions: Mapping[str, Any], stays: NDArray[np.bool_]) -> dict[str, list[int]]:
    flat = _expanded(positions, "position")
    return _runs(flat[: len(stays)][stays[: len(flat)]], "position")


def _runs(numbers: Ints, name: str, *others: Ints) -> dict[str, list[int]]:
    """Runs of numbers that go up by one, where others stay as they are; the first and the count."""
    if not len(numbers):
        return {name: [], "count": []}
    breaks = np.diff(numbers) != 1
    for other in others:
        breaks |= np.diff(other) != 0
    begins = ints([0, *(np.flatnonzero(breaks) + 1)])
    counts = np.diff(np.append(begins, len(numbers)))
    return {name: numbers[begins].tolist(), "count": counts.tolist()}


def _restore_without(restore: Mapping[str, Any], moved: list[Ints]) -> dict[str, list[int]]:
    owner, row = ints(restore["rank"])[each(ints(restore["count"]))[0]], _expanded(restore, "row")
    base = offsets(ints([len(places) for places in moved]))
    places = np.concatenate([*moved, ints([-1])])
    inside = row < np.diff(base)[owner]
    row = np.where(inside, places[np.where(inside, base[owner] + row, -1)], row)
    owner, row = owner[row >= 0], row[row >= 0]
    runs = _runs(row, "row", owner)
    return {"rank": owner[offsets(ints(runs["count"]))[:-1]].tolist(), **runs}


def _shortened(document: Document, search: _Search) -> Document:
    """Cut sequences to an eighth, half, three quarters of their new tokens while that shows it."""
    for number in range(min(len(document.get("requests", ())), 4)):
        while True:
            tokens = document["requests"][number]["extend"]
            shares = (tokens // 8, tokens // 2, tokens * 3 // 4, tokens - 1)
            lengths = sorted({share for share in shares if 0 < share < tokens})
            candidates = (
                cut(document, number, length) for length in lengths if search.allows(document)
            )
            found = next((c for c in candidates if c is not None and search.holds(c)), None)
            if found is None:
                break
            document = found
    return document


def cut(document: Document, request: int, extend: int) -> Document | None:
    """The document with fewer new tokens of a request; None where its parts do not allow it.

    Rows and calls can be cut; tables stay as they are, longer than need be.
    """
    parts = {"positions", "key_lens", "selections", "units", "writes"}
    whole = document["requests"][request]
    if whole.get("pad") or any(parts & set(rank) for rank in document.get("ranks", ())):
        return None
    if {"restore", "topk"} & set(document):
        return None
    end = whole.get("prefix", 0) + extend
    small = dict(document)
    small["requests"] = list(document["requests"])
    small["requests"][request] = whole | {"extend": extend}
    ranks = [_rank_cut(rank, request, end) for rank in document.get("ranks", ())]
    if any(rank is None for rank in ranks):
        return None
    small["ranks"] = ranks
    return small


def _rank_cut(rank: Mapping[str, Any], request: int, end: int) -> dict[str, Any] | None:
    if "rows" not in rank:
        return dict(rank)
    rows = rank["rows"]
    steps = rows.get("step", [1] * len(rows["count"]))
    left = [
        min(count, max(-(-(end - position) // step), 0)) if owner == request else count
        for owner, position, count, step in zip(
            rows["request"], rows["position"], rows["count"], steps, strict=True
        )
    ]
    small = dict(rank)
    small["rows"] = rows | {"count": left}
    if "segments" not in rank:
        return small
    segments = rank["segments"]
    if any(source >= 0 for source in segments.get("from", ())):
        return None
    if {"window", "window_right"} & {*segments} and 0 in segments.get("step", ()):
        return None  # the window of a row goes with the number of rows behind it
    run, place = each(ints(rows["count"]))
    before = offsets((place < ints(left)[run]).astype(np.int64))
    steps = segments.get("step", [1] * len(segments["row"]))
    begin = np.array(segments["row"], int)
    whole = np.array(segments["rows"], int)
    if len(begin) and int((begin + whole).max()) >= len(before):
        return None
    kept = before[begin + whole] - before[begin]
    # Rows go from the end of a call only: those of a call over several runs would not.
    if (before[begin + kept] - before[begin] != kept).any():
        return None
    keys = np.array(segments["keys"], int) - (whole - kept) * np.array(steps, int)
    real = kept > 0
    columns = {"row": before[begin], "rows": kept, "keys": keys}
    columns |= {k: np.array(v, int) for k, v in segments.items() if k not in columns}
    small["segments"] = {name: values[real].tolist() for name, values in columns.items()}
    return small
