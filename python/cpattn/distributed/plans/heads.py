# SPDX-License-Identifier: Apache-2.0
"""The heads of a layer: their sizes, and how ranks share them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer that decide how much travels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    q_bytes: int  # of an element of queries and results
    kv_bytes: int  # of an element of keys and values
    shares_values: bool = False  # values are a part of the keys


@dataclass(frozen=True)
class HeadShare:
    """The query heads of a rank, and the KV heads that they read."""

    q: slice
    kv: slice

    @property
    def num_heads(self) -> int:
        """Query heads, possibly none."""
        return int(self.q.stop - self.q.start)


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[HeadShare]:
    """Heads for each rank: whole groups that share a KV head, or parts of one group."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        bounds = [num_kv_heads * rank // size for rank in range(size + 1)]
        return [
            HeadShare(slice(begin * group, end * group), slice(begin, end))
            for begin, end in itertools.pairwise(bounds)
        ]
    owned = [rank * num_kv_heads // size for rank in range(size)]
    shares = []
    for rank, head in enumerate(owned):
        turn, turns = rank - owned.index(head), owned.count(head)
        begin = head * group
        heads = slice(begin + group * turn // turns, begin + group * (turn + 1) // turns)
        shares.append(HeadShare(heads, slice(head, head + 1)))
    return shares


def head_parts(shares: list[HeadShare], num_parts: int) -> list[list[HeadShare]]:
    """The shares in parts, each of some KV heads of every rank; fewer where a rank has fewer."""
    counts = [share.kv.stop - share.kv.start for share in shares]
    num_parts = max(1, min(num_parts, *counts))
    groups = [share.num_heads // count for share, count in zip(shares, counts, strict=True)]
    parts = []
    for part in range(num_parts):
        of_ranks = []
        for share, count, group in zip(shares, counts, groups, strict=True):
            begin, end = count * part // num_parts, count * (part + 1) // num_parts
            q, kv = share.q.start, share.kv.start
            of_ranks.append(
                HeadShare(slice(q + begin * group, q + end * group), slice(kv + begin, kv + end))
            )
        parts.append(of_ranks)
    return parts
