# SPDX-License-Identifier: Apache-2.0
"""Rounds of KV heads: one round travels while the previous one is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ... import _core

Round = TypeVar("Round")
Arriving = TypeVar("Arriving")

# More rounds hide little more: the first exchange and the last attention never overlap.
_MOST_ROUNDS = 8
# Least bytes that a rank receives in a round; with fewer, messages cost more than they hide.
_LEAST_BYTES = 1 << 20
# A rank that computes more per received byte has little to hide: at 1 TFLOP/s and 1 Gbit/s a sixth
# of a layer, which is also the extra time that attention of single heads may take.
_MOST_FLOPS_PER_BYTE = 50_000


def head_rounds(
    num_kv_heads: int, received_bytes: int, flops: int, largest: int | None = None
) -> list[slice]:
    """Return the KV heads of each round, at most `largest` per round.

    `received_bytes` and `flops` are totals of a rank over all heads, the same on every rank.
    """
    limits = _MOST_ROUNDS, _LEAST_BYTES, _MOST_FLOPS_PER_BYTE, largest
    return _core.head_rounds(num_kv_heads, received_bytes, flops, *limits)


def side_by_side(
    rounds: Sequence[Round],
    begin: Callable[[Round, int], Arriving],
    compute: Callable[[Round, Arriving], None],
) -> None:
    """Compute each round while the next one travels; at most two are under way at a time.

    `begin` gets the number of the free buffer, 0 or 1; `compute` waits for the result of `begin`.
    """
    coming = begin(rounds[0], 0)
    for i, round_ in enumerate(rounds):
        arriving = coming
        if i + 1 < len(rounds):
            coming = begin(rounds[i + 1], (i + 1) % 2)
        compute(round_, arriving)
