# SPDX-License-Identifier: Apache-2.0
"""A document as arrays over all ranks, and the numbering of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..findings import NotUsable
from .intervals import Absent as Absent
from .intervals import Ints, each, ints, offsets, shard_length
from .intervals import Undecided as Undecided

Columns: TypeAlias = dict[str, Ints]


@dataclass(frozen=True)
class Plan:
    """Plans of all ranks from a document.

    Attributes
    ----------
    document : mapping
        Validated, in the form of `document.SCHEMA`.
    name : str
        Name in reports.
    """

    document: Mapping[str, Any]
    name: str

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_groups()

    @cached_property
    def ranks(self) -> list[Mapping[str, Any]]:
        return list(self.document.get("ranks", ()))

    @cached_property
    def requests(self) -> list[Mapping[str, Any]]:
        return list(self.document.get("requests", ()))

    @cached_property
    def prefix(self) -> Ints:
        return ints([request.get("prefix", 0) for request in self.requests])

    @cached_property
    def extend(self) -> Ints:
        return ints([request["extend"] for request in self.requests])

    @cached_property
    def pad(self) -> Ints:
        return ints([request.get("pad", 0) for request in self.requests])

    @property
    def lengths(self) -> Ints:
        """Cached and new tokens of each request, without padding."""
        return self.prefix + self.extend

    @cached_property
    def token_base(self) -> Ints:
        """Number of the first new token of each request among all new tokens, then their sum."""
        return offsets(self.extend)

    @property
    def num_tokens(self) -> int:
        return int(self.token_base[-1])

    @property
    def causal(self) -> bool:
        return bool(self.document.get("attention", {}).get("causal", True))

    @property
    def window(self) -> int | None:
        return self.document.get("attention", {}).get("window")

    @property
    def window_right(self) -> int | None:
        """Number of visible keys after a query's own; None for all, up to a causal mask."""
        return self.document.get("attention", {}).get("window_right")

    @cached_property
    def everywhere(self) -> NDArray[np.bool_]:
        """Flags of the requests for which each rank has every query."""
        common = self.document.get("queries", "split")
        return np.array([r.get("queries", common) == "all" for r in self.requests], bool)

    @cached_property
    def cache(self) -> Mapping[str, Any]:
        return self.document.get("cache", {})

    @property
    def shards(self) -> int:
        return int(self.cache.get("shards", 1))

    @property
    def interleave(self) -> int:
        return int(self.cache.get("interleave", 1))

    def shard(self, rank: int) -> int:
        """Return the rank's share of the keys: its index unless the document differs."""
        return int(self.ranks[rank].get("shard", rank % self.shards))

    @cached_property
    def shard_by_rank(self) -> Ints:
        return ints([self.shard(rank) for rank in range(len(self.ranks))])

    def copy_by_rank(self, part: str) -> Ints:
        """Count, for each rank, the earlier ranks with its shard and this part.

        Ranks with one count hold a copy of all shards, if all shards have equally many ranks.
        """
        before: Counter[int] = Counter()
        copies = []
        for rank, said in enumerate(self.ranks):
            copies.append(before[self.shard(rank)])
            before[self.shard(rank)] += part in said
        return ints(copies)

    def kept(self, rank: int) -> Ints:
        """Count the keys of each request that belong into the cache of a rank."""
        return shard_length(self.lengths, self.shard(rank), self.shards, self.interleave)

    @cached_property
    def rows(self) -> Columns:
        """Return runs of rows of all ranks; padding rows have request -1.

        ``row`` is the first local row of a run, ``at`` its index among the rows of all ranks.
        """
        runs = self.gathered("rows", {"request": None, "position": None, "count": None, "step": 1})
        runs = self._without_padding_tokens(runs)
        runs["at"] = offsets(runs["count"])[:-1]
        runs["row"] = runs["at"] - self.row_base(runs)[runs["rank"]]
        return runs

    def row_base(self, runs: Columns) -> Ints:
        """Return the first row of each rank among the rows of all, and their sum."""
        sums = np.bincount(runs["rank"], weights=runs["count"], minlength=len(self.ranks))
        return offsets(sums.astype(np.int64))

    @cached_property
    def segments(self) -> Columns:
        """Attention calls of all ranks."""
        columns: dict[str, int | None] = dict.fromkeys(("request", "row", "rows", "keys"))
        columns |= {"step": 1, "first": 0, "from": -1, "window": -1, "window_right": -1}
        return self.gathered("segments", columns)

    def gathered(self, part: str, columns: Mapping[str, int | None]) -> Columns:
        """Return a part of all ranks: its columns and ``rank``; missing columns have defaults."""
        if not any(part in rank for rank in self.ranks):
            raise Absent(f"no rank has {part}")
        parts = [rank.get(part, {}) for rank in self.ranks]
        counts = [len(next(iter(part.values()), ())) for part in parts]
        table = {"rank": np.repeat(np.arange(len(parts)), counts)}
        for name, default in columns.items():
            pieces = [
                ints(part[name]) if name in part else np.full(count, default, np.int64)
                for part, count in zip(parts, counts, strict=True)
                if count
            ]
            table[name] = np.concatenate(pieces) if pieces else ints([])
        return table

    def _without_padding_tokens(self, runs: Columns) -> Columns:
        """Cut runs where the padding after a request begins; later rows are padding."""
        known = runs["request"] >= 0
        owner = np.where(known, runs["request"], 0)
        if not len(self.requests) or not self.pad.any():
            return runs
        ends, pads = self.lengths[owner], self.pad[owner]
        real = np.clip(-(-(ends - runs["position"]) // runs["step"]), 0, runs["count"])
        last = runs["position"] + (runs["count"] - 1) * runs["step"]
        padded = known & (real < runs["count"]) & (last < ends + pads)
        real = np.where(padded, real, runs["count"])
        source, half = each(1 + padded.astype(np.int64))
        cut = {name: values[source] for name, values in runs.items()}
        rest = runs["count"][source] - real[source]
        cut["count"] = np.where(half == 0, real[source], rest)
        cut["request"] = np.where(half == 0, cut["request"], -1)
        return cut

    def token_of(self, request: Any, position: Any) -> Ints:
        """Return the number of a new token among the new tokens of all requests."""
        return self.token_base[request] + np.asarray(position) - self.prefix[request]

    def place(self, token: int) -> tuple[int, int]:
        """Return request and position of a token number."""
        request = int(np.searchsorted(self.token_base, token, side="right")) - 1
        return request, int(token - self.token_base[request] + self.prefix[request])

    def table(self, rank: int) -> list[list[int]] | None:
        """Return the pages of each request in this rank's tables."""
        return self.ranks[rank].get("tables", self.cache.get("tables"))

    @cached_property
    def _everyone(self) -> tuple[tuple[int, ...], frozenset[int]]:
        numbers = tuple(range(len(self.ranks)))
        return numbers, frozenset(numbers)

    def group(self, call: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the ranks of a collective."""
        return tuple(call["group"]) if "group" in call else self._everyone[0]

    def members(self, call: Mapping[str, Any]) -> frozenset[int]:
        """Return the ranks without order; for all ranks the same object, hashed once."""
        return frozenset(call["group"]) if "group" in call else self._everyone[1]

    @cached_property
    def meant(self) -> dict[str, dict[int, frozenset[int]]]:
        """Group of each rank that is in one, for each name of `groups`."""
        named: Mapping[str, list[list[int]]] = self.document.get("groups", {})
        return {
            name: {rank: members for members in map(frozenset, groups) for rank in members}
            for name, groups in named.items()
        }

    def _check_groups(self) -> None:
        """Check that groups have existing ranks, each once, and that calls name a group."""
        for name, groups in self.document.get("groups", {}).items():
            members = [rank for group in groups for rank in group]
            self._below(f"groups.{name}", max(members, default=-1), len(self.ranks))
            if len(set(members)) < len(members):
                raise NotUsable(f"{self.name}: groups.{name}: must have each rank once at most")
        for number, rank in enumerate(self.ranks):
            for index, call in enumerate(rank.get("collectives", ())):
                if "over" in call and call["over"] not in self.meant:
                    raise NotUsable(
                        f"{self.name}: ranks[{number}].collectives[{index}].over: must be a name "
                        f"of groups, got {call['over']!r:.60}"
                    )

    def _check_numbers(self) -> None:
        """Check that numbers of requests, ranks and memories exist."""
        limits = {"request": len(self.requests), "from": len(self.ranks), "rank": len(self.ranks)}
        for number, request in enumerate(self.requests):
            if "shares" in request:
                earlier = request["shares"]["request"]
                self._below(f"requests[{number}].shares.request", earlier, number)
        parts = [("restore", self.document.get("restore", {}))]
        for number, rank in enumerate(self.ranks):
            for part in ("rows", "segments", "writes", "selections", "units"):
                parts.append((f"ranks[{number}].{part}", rank.get(part, {})))
            self._below(f"ranks[{number}].shard", rank.get("shard", 0), self.shards)
            for index, call in enumerate(rank.get("collectives", ())):
                where = f"ranks[{number}].collectives[{index}]"
                for value in (*call.get("group", ()), call.get("root", 0), call.get("peer", 0)):
                    self._below(where, value, len(self.ranks))
                if call["kind"] in ("send", "recv") and "peer" not in call:
                    raise NotUsable(f"{self.name}: {where}: {call['kind']} must have a peer")
                if number not in call.get("group", (number,)):
                    raise NotUsable(f"{self.name}: {where}.group: must have rank {number} in it")
            lists = [rank.get("key_lens"), rank.get("tables")]
            self._one_each(f"ranks[{number}]", lists)
        self._one_each("cache", [self.cache.get("tables")])
        for place, columns in parts:
            for name, limit in limits.items():
                self._below(f"{place}.{name}", max(columns.get(name, ()), default=-1), limit)
        for index, transfer in enumerate(self.document.get("transfers", ())):
            for side in ("from", "to"):
                if transfer[side] not in self.document.get("memories", {}):
                    raise NotUsable(
                        f"{self.name}: transfers[{index}].{side}: must be one of memories, "
                        f"got {transfer[side]!r:.60}"
                    )
            for begin in ("src", "dst"):
                pairs = zip(transfer[begin], transfer["length"], strict=True)
                self._ends(f"transfers[{index}].{begin}", pairs)
        for name, memory in self.document.get("memories", {}).items():
            for index, entry in enumerate(memory["entries"]):
                if entry.get("kv_layout") == "HND" and "heads" not in entry:
                    raise NotUsable(
                        f"{self.name}: memories.{name}.entries[{index}]: must have heads with "
                        "kv_layout 'HND'"
                    )
            sizes = [(entry["addr"], entry["nbytes"]) for entry in memory["entries"]]
            self._ends(f"memories.{name}.entries", sizes)
            self._ends(f"memories.{name}.registered", memory.get("registered", ()))
        for index, merge in enumerate(self.document.get("merges", ())):
            for part in merge["parts"]:
                self._below(f"merges[{index}].parts.rank", part["rank"], len(self.ranks))
            self._below(f"merges[{index}].request", merge.get("request", -1), len(self.requests))
        for index, scores in enumerate(self.document.get("topk", {}).get("scores", ())):
            where = f"topk.scores[{index}].request"
            self._below(where, scores["request"], len(self.requests))

    def _below(self, place: str, value: int, limit: int) -> None:
        if value >= max(limit, 1 if value == 0 and not place.endswith("request") else 0):
            raise NotUsable(f"{self.name}: {place}: must be below {limit}, got {value}")

    def _ends(self, place: str, ranges: Iterable[Sequence[int]]) -> None:
        """Check that ranges of bytes end within the address range."""
        end = max((begin + size for begin, size in ranges), default=0)
        if end >= 2**64:
            raise NotUsable(f"{self.name}: {place}: must end below {2**64}, got {end}")

    def _one_each(self, place: str, lists: list[Any]) -> None:
        for values in lists:
            if values is not None and len(values) != len(self.requests):
                raise NotUsable(
                    f"{self.name}: {place}: tables and key_lens must have one entry for each of "
                    f"{len(self.requests)} requests, got {len(values)}"
                )
