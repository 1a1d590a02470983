# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and new keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._visibility import Lengths


class Rotary:
    """Checked cosines and sines by position.

    Parameters
    ----------
    cos, sin : tensors of floats, shape [num_positions, rotary_dim / 2]
    interleaved : bool
        Whether rotation pairs elements 2 i and 2 i + 1, or i and i + rotary_dim / 2.
    """

    def __init__(self, function: str, cos: Any, sin: Any, interleaved: bool, head_dim: int) -> None:
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            if getattr(x, "ndim", 0) != 2 or not x.is_floating_point() or x.element_size() < 2:
                raise ValueError(
                    f"{function}: {name} must be numbers [num_positions, rotary_dim / 2], got "
                    f"{getattr(x, 'dtype', type(x).__name__)} {list(getattr(x, 'shape', ()))}"
                )
        if cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
            raise ValueError(
                f"{function}: rotary_cos and rotary_sin must be of one shape, with at most "
                f"{head_dim // 2} columns, got {list(cos.shape)} and {list(sin.shape)}"
            )
        half = cos.shape[1]
        self._tables = cos, sin
        self._first, self._second = slice(half), slice(half, 2 * half)
        if interleaved:
            self._first, self._second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        self._function = function

    def check(self, lengths: Lengths, num_tokens: int) -> None:
        """Refuse tokens after `lengths` that have no angles."""
        needed = int(lengths.max(initial=0)) + num_tokens
        if needed > len(self._tables[0]):
            raise ValueError(
                f"{self._function}: rotary_cos must have {needed} rows, one for each position, "
                f"got {len(self._tables[0])}"
            )

    def turned(self, x: AnyTensor, lengths: Lengths, *, at_one_position: bool = False) -> AnyTensor:
        """Return x [batch, tokens, heads, dim] rotated, in float32 and rounded once.

        Tokens have the positions from `lengths` on, or all have the position `lengths`.
        """
        import torch

        tokens = 1 if at_one_position else x.shape[1]
        positions = torch.from_numpy(lengths[:, None] + np.arange(tokens))
        cos, sin = (table[positions].unsqueeze(2).float() for table in self._tables)
        first, second = x[..., self._first].float(), x[..., self._second].float()
        out = x.clone()
        out[..., self._first] = first * cos - second * sin
        out[..., self._second] = first * sin + second * cos
        return out
