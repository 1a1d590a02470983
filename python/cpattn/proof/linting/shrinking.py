# SPDX-License-Identifier: Apache-2.0
"""Makes a document smaller as long as it still shows a fault.

Requests are left out, then parts that other invariants need, then the ends of sequences. Each step
leaves a right plan right: what is left of the document still fits together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..findings import NotUsable
from .model import Absent

Document: TypeAlias = dict[str, Any]
MOST_TRIES = 60

#: Parts that each invariant is decided by; others are left out first.
_OF_RANKS = {
    "OWN": ("rows", "positions", "segments", "writes", "heads", "tables", "shard"),
    "COV": ("rows", "segments", "shard"),
    "LEN": ("rows", "segments", "shard", "key_lens", "tables"),
    "LSE": ("shard",),
    "SEQ": ("collectives",),
    "XFER": (),
    "TOPK": ("selections", "shard"),
    "ADDR": ("writes", "buffers", "products"),
    "PAD": ("rows", "segments", "writes", "shard"),
    "BAL": ("rows", "segments", "shard"),
}
_OF_DOCUMENTS = {
    "OWN": ("restore", "heads"),
    "LSE": ("merges",),
    "SEQ": ("groups",),
    "XFER": ("memories", "transfers"),
    "TOPK": ("topk",),
    "BAL": ("balance",),
}
_ALWAYS = ("schema", "name", "requests", "queries", "attention", "cache", "ranks")
_COLUMNS = ("rows", "segments", "writes", "selections")


def shrunk(
    document: Mapping[str, Any], invariant: str, shows: Callable[[Document], bool]
) -> Document:
    """The smallest document found for which `shows` holds, beginning with this one."""
    search = _Search(shows)
    small = search.better(dict(document), _without_parts(document, invariant))
    small = _without_requests(_without_more_parts(small, search), search)
    return _shortened(small, search)


class _Search:
    """Tries candidates, so many and no more."""

    def __init__(self, shows: Callable[[Document], bool]) -> None:
        self._shows = shows
        self._left = MOST_TRIES

    def better(self, now: Document, candidate: Document | None) -> Document:
        """The candidate if it shows the fault, else what there was."""
        return candidate if candidate is not None and self.holds(candidate) else now

    def holds(self, candidate: Document) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        try:
            return self._shows(candidate)
        except (Absent, NotUsable):
            return False


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
            allowed = len(dropped) < size and not _is_shared(document, dropped)
            candidate = without(document, dropped) if allowed else None
            better = search.better(document, candidate)
            if better is document:
                begin += chunk
            document, size = better, len(better["requests"])
        chunk //= 2
    return document


def _is_shared(document: Document, dropped: set[int]) -> bool:
    """Whether others say how far they are like one of these: without it they would be alone."""
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
) -> tuple[dict[str, Any], np.ndarray]:
    """A rank's part, and where each of its rows is then, -1 for those that are gone."""
    small = dict(rank)
    rows = rank.get("rows", {"request": [], "count": []})
    stays = np.repeat([owner in new for owner in rows["request"]], rows["count"]).astype(bool)
    places = np.where(stays, np.cumsum(stays) - 1, -1)
    before = np.concatenate([[0], np.cumsum(stays)]).astype(int)
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


def _expanded(runs: Mapping[str, Any], name: str) -> np.ndarray:
    steps = runs.get("step", [1] * len(runs["count"]))
    parts = [
        np.arange(count) * step + first
        for first, count, step in zip(runs[name], runs["count"], steps, strict=True)
    ]
    return np.concatenate(parts) if parts else np.array([], int)


def _kept_positions(positions: Mapping[str, Any], stays: np.ndarray) -> dict[str, list[int]]:
    flat = _expanded(positions, "position")
    kept = flat[: len(stays)][stays[: len(flat)]]
    runs = np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1) if len(kept) else []
    return {"position": [int(r[0]) for r in runs], "count": [len(r) for r in runs]}


def _restore_without(restore: Mapping[str, Any], moved: list[np.ndarray]) -> dict[str, list[int]]:
    rank = np.repeat(restore["rank"], restore["count"]).astype(int)
    row = _expanded(restore, "row").astype(int)
    inside = [r < len(moved[owner]) for owner, r in zip(rank, row, strict=True)]
    new = [moved[o][r] if ok else r for o, r, ok in zip(rank, row, inside, strict=True)]
    kept = [(int(o), int(r)) for o, r in zip(rank, new, strict=True) if r >= 0]
    return {
        "rank": [owner for owner, _ in kept],
        "row": [r for _, r in kept],
        "count": [1] * len(kept),
    }


def _shortened(document: Document, search: _Search) -> Document:
    """Cut sequences to an eighth, half, three quarters of their new tokens while that shows it."""
    for number in range(min(len(document.get("requests", ())), 4)):
        while True:
            tokens = document["requests"][number]["extend"]
            shares = (tokens // 8, tokens // 2, tokens * 3 // 4, tokens - 1)
            lengths = sorted({share for share in shares if 0 < share < tokens})
            candidates = (cut(document, number, length) for length in lengths)
            found = next((c for c in candidates if c is not None and search.holds(c)), None)
            if found is None:
                break
            document = found
    return document


def cut(document: Document, request: int, extend: int) -> Document | None:
    """The document with fewer new tokens of a request; None where its parts do not allow it.

    Rows and calls can be cut; tables stay as they are, longer than need be.
    """
    parts = {"positions", "key_lens", "selections", "writes"}
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
    both = zip(rows["count"], left, strict=True)
    stays = np.array([row < kept for count, kept in both for row in range(count)], bool)
    before = np.concatenate([[0], np.cumsum(stays)]).astype(int)
    steps = segments.get("step", [1] * len(segments["row"]))
    begin = np.array(segments["row"], int)
    whole = np.array(segments["rows"], int)
    if len(begin) and int((begin + whole).max()) >= len(before):
        return None
    kept = before[begin + whole] - before[begin]
    # Rows go from the end of a call only: those of a call over several runs would not.
    inside = [stays[b : b + k].all() for b, k in zip(begin, kept, strict=True)]
    if not all(inside):
        return None
    keys = np.array(segments["keys"], int) - (whole - kept) * np.array(steps, int)
    real = kept > 0
    columns = {"row": before[begin], "rows": kept, "keys": keys}
    columns |= {k: np.array(v, int) for k, v in segments.items() if k not in columns}
    small["segments"] = {name: values[real].tolist() for name, values in columns.items()}
    return small
