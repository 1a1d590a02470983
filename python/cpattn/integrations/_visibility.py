# SPDX-License-Identifier: Apache-2.0
"""Windows on both sides of a token, as the arguments of `paged_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np

Lengths = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def visibility(left: int, right: int) -> dict[str, Any]:
    """Arguments for a token at position p that sees keys from p - left to p + right.

    Negative means unbounded. The libraries that ask for such windows let the last query meet the
    last key: of more queries than keys the first see nothing.
    """
    sides = tuple(side if side >= 0 else None for side in (left, right))
    return {"causal": False, "window": sides}


def check_bits(function: str, packed: Any, q_lens: Lengths, kv_lens: Lengths) -> None:
    """Refuse what are not the bits of a mask, as `paged_attention` takes them."""
    bits = np.asarray(packed)
    size = int((-(-q_lens * kv_lens // 8)).sum())
    if bits.dtype != np.uint8 or bits.shape != (size,):
        raise ValueError(
            f"{function}: packed_custom_mask must be uint8 [{size}], got {bits.dtype} "
            f"{list(bits.shape)}"
        )


def band_mask(q_lens: Lengths, kv_lens: Lengths, left: int, right: int) -> Mask:
    """A bool for each query and key of each sequence, row-major, flat."""
    masks = [np.zeros(0, bool)]
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        position = np.arange(kv_len - q_len, kv_len)[:, None]
        distance = np.arange(kv_len) - position
        visible = np.ones(distance.shape, bool)
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
        masks.append(visible.ravel())
    return np.concatenate(masks)
