# SPDX-License-Identifier: Apache-2.0
"""Some KV heads after others: those of one round travel while those of the last are attended to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ... import _core

Round = TypeVar("Round")
Arriving = TypeVar("Arriving")

# More would hide little more: the first round's exchange and the last one's attention are alone.
_MOST_ROUNDS = 8
# A rank receives so many bytes in a round at least; below, its messages cost more than they hide.
_LEAST_BYTES = 1 << 20
# A rank that computes more for each byte that it receives has little to hide: at 1 TFLOP/s and 1
# Gbit/s a sixth of a layer, which is what attention of single heads may take longer.
_MOST_FLOPS_PER_BYTE = 50_000


def head_rounds(
    num_kv_heads: int, received_bytes: int, flops: int, largest: int | None = None
) -> list[slice]:
    """The KV heads of each round, of which none has more than `largest`.

    `received_bytes` and `flops` are those of a rank in all of them, the same on every rank.
    """
    limits = _MOST_ROUNDS, _LEAST_BYTES, _MOST_FLOPS_PER_BYTE, largest
    return _core.head_rounds(num_kv_heads, received_bytes, flops, *limits)


def side_by_side(
    rounds: Sequence[Round],
    begin: Callable[[Round, int], Arriving],
    compute: Callable[[Round, Arriving], None],
) -> None:
    """Compute each round while the next is on its way; two are under way at a time at most.

    `begin` is told which of two buffers, 0 or 1, is free; `compute` waits for what it is given.
    """
    coming = begin(rounds[0], 0)
    for i, round_ in enumerate(rounds):
        arriving = coming
        if i + 1 < len(rounds):
            coming = begin(rounds[i + 1], (i + 1) % 2)
        compute(round_, arriving)
