# SPDX-License-Identifier: Apache-2.0
"""Windows on both sides of a token, as the arguments of `paged_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np

Lengths = np.ndarray[Any, np.dtype[np.int64]]


def visibility(left: int, right: int) -> dict[str, Any]:
    """Return arguments for a token at position p that sees keys from p - left to p + right.

    Negative numbers mean no bound. The last query meets the last key; if there are more queries
    than keys, the first queries see none.
    """
    sides = tuple(side if side >= 0 else None for side in (left, right))
    return {"causal": False, "window": sides}


def check_bits(function: str, packed: Any, q_lens: Lengths, kv_lens: Lengths) -> None:
    """Refuse bits that are no mask in the form of `paged_attention`."""
    bits = np.asarray(packed)
    size = int((-(-q_lens * kv_lens // 8)).sum())
    if bits.dtype != np.uint8 or bits.shape != (size,):
        raise ValueError(
            f"{function}: packed_custom_mask must be uint8 [{size}], got {bits.dtype} "
            f"{list(bits.shape)}"
        )
