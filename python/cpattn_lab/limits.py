# SPDX-License-Identifier: Apache-2.0
"""Checks of lengths and numbers that the models, traces and replays are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from cpattn._limits import shown


def check_seq_lens(function: str, seq_lens: Sequence[int], extend_lens: Sequence[int]) -> None:
    """Raise ValueError unless each sequence has a length that covers its new tokens."""
    if len(seq_lens) != len(extend_lens):
        raise ValueError(
            f"{function}: seq_lens must have as many elements as extend_lens, "
            f"got {len(seq_lens)} and {len(extend_lens)}"
        )
    for i, (length, new) in enumerate(zip(seq_lens, extend_lens, strict=True)):
        if length < new:
            raise ValueError(
                f"{function}: seq_lens must be >= extend_lens, got {length} for {new} at index {i}"
            )


def check_number(function: str, name: str, value: Any, *, positive: bool = True) -> None:
    """Raise TypeError unless an argument is a number, ValueError unless finite and > 0, or >= 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{function}: {name} must be a number, got {shown(value)}")
    if not math.isfinite(value) or value < 0 or (positive and not value):
        rule = "positive and finite" if positive else ">= 0 and finite"
        raise ValueError(f"{function}: {name} must be {rule}, got {value}")
