# SPDX-License-Identifier: Apache-2.0
"""Terms that ranks compare before they exchange rows, and digests of long values."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

from . import versions
from .row_bytes import ROW_ALIGNMENT

PLAN_TERMS = ("lengths", "strategy and page_size", "block_tables", "slots", "mask", "placement")
NO_TERMS = (0,) * len(PLAN_TERMS)  # for calls without a plan, or with an invalid one
CALLS = (
    "write_kv", "gather", "attend", "decode", "topology", "shared_memory", "attend_sparse",
    "decode_sparse", "prefetch", "agreement",
)  # fmt: skip
# The ranks compare these before an exchange, int64 each. The first difference is reported.
TERMS = (
    "refused", "sequence", "call", *PLAN_TERMS, "rows", "prefetch", "exchange", "options",
    "shared memory",
)  # fmt: skip
# Options that checks may add to the terms, besides rows and plans.
OPTIONS = ("prefetch", "exchange", "options")
MOST_VALUES = 32  # that ranks tell each other at a time, through shared memory
REASON = struct.Struct(f"<{MOST_VALUES}q")  # UTF-8 bytes of the reason for a refusal
# Ranks with other names here cannot read each other's messages.
_LAYOUT_NAMES = (versions.PROTOCOL, CALLS, TERMS, ROW_ALIGNMENT)


def digest(*values: Any) -> int:
    """Return 64 bits that digest the bytes of values."""
    hashed = blake2b(digest_size=8)
    for value in values:
        hashed.update(value)
    return int.from_bytes(hashed.digest(), "little", signed=True)


def term(value: Hashable) -> int:
    """Return 64 bits that digest a value of numbers, names and dtypes."""
    hash(value)  # this refuses arrays, whose repr leaves elements out
    return digest(repr(value).encode())


def layout() -> int:
    """Return 64 bits that digest this version's message layout."""
    return term(_LAYOUT_NAMES)


def refuse_difference(
    call: str, terms: Sequence[tuple[int, ...]], names: Sequence[str] = TERMS
) -> None:
    """Raise the first difference between ranks: terms[i] has each rank's values, by `names`."""
    for name, values in zip(names, terms, strict=True):
        usual = max(values, key=values.count)  # on a tie, that of the lowest rank
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            first = values.index(usual)
            reason = f"{name} of {ranks_text(odd)} differs from rank {first}"
            if names is TERMS and name == "call":
                made = [f"rank {rank} calls {CALLS[values[rank]]}" for rank in (first, *odd)]
                reason += f" ({', '.join(made)})"
            elif names is TERMS and name == "sequence":
                made = [f"rank {rank} makes call {values[rank]}" for rank in (first, *odd)]
                reason += f" ({', '.join(made)} of its group)"
            raise RuntimeError(f"ContextParallel.{call}: {reason}; nothing was sent")


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
