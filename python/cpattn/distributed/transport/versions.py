# SPDX-License-Identifier: Apache-2.0
"""First message between ranks: the version of cpattn, and its message layout.

The form of these eight numbers is the same in all versions, so that ranks with different versions
can report it. Only the layout is compared: versions with the same layout understand each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ... import _core

# Increase it if ranks of two versions would misread each other despite equal names of terms, as
# other rows, another order of exchanges or other digests cause.
PROTOCOL = 3
_MAGIC = int.from_bytes(b"cpattn\0\0", "little")
_NAME_BYTES = 48  # bytes of a version's name
_FORM = struct.Struct(f"<qq{_NAME_BYTES}s")
NUM_VALUES = _FORM.size // 8


def own_values(layout: int) -> list[int]:
    """Return the values that this rank sends to the others."""
    name = _core.__version__.encode()[:_NAME_BYTES]
    return list(struct.unpack(f"<{NUM_VALUES}q", _FORM.pack(_MAGIC, layout, name)))


def difference(told: Sequence[Sequence[int]]) -> str | None:
    """Return the difference of the ranks' versions as an error text; None if they agree."""
    ranks = [_FORM.unpack(struct.pack(f"<{NUM_VALUES}q", *values)) for values in told]
    if len({(magic, layout) for magic, layout, _ in ranks}) == 1:
        return None
    names = [
        f"{name.rstrip(bytes(1)).decode(errors='replace')} (layout {layout & (2**64 - 1):016x})"
        if magic == _MAGIC
        else "another program"
        for magic, layout, name in ranks
    ]
    usual = max(names, key=names.count)  # on a tie, that of the lowest rank
    odd = [rank for rank, name in enumerate(names) if name != usual]
    others = ", ".join(dict.fromkeys(names[rank] for rank in odd))
    ranks_of_others = ", ".join(map(str, odd))
    return f"cpattn of rank {ranks_of_others} is {others}, of rank {names.index(usual)} {usual}"
