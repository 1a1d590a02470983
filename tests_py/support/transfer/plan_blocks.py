# SPDX-License-Identifier: Apache-2.0
"""Plans as lists of blocks, for comparisons."""

from typing import Any


def blocks(plan: Any) -> list[tuple[int, int, int]]:
    """Return (source address, destination address, bytes) of every block."""
    arrays = (plan.src_addrs, plan.dst_addrs, plan.lengths)
    return list(zip(*(array.tolist() for array in arrays), strict=True))
