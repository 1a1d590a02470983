# SPDX-License-Identifier: Apache-2.0
"""Checks that refuse bad numbers instead of reinterpreting or dropping them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np


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


def check_kind(function: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless an argument is of a class."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{function}: {name} must be of {kind.__name__}, got {type(value).__name__}"
        )


def check_integer(
    function: str, name: str, value: Any, low: int = 1, high: int | None = None
) -> None:
    """Raise TypeError unless an argument is an integer, ValueError unless it is in its range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{function}: {name} must be an integer, got {_shown(value)}")
    if value < low:
        raise ValueError(f"{function}: {name} must be >= {low}, got {_shown(value)}")
    if high is not None and value > high:
        raise ValueError(f"{function}: {name} must be <= {high}, got {_shown(value)}")


def _shown(value: object) -> str:
    """Show a value in a message, cut to fit, or else its type."""
    try:
        return f"{value!r:.80}"
    except Exception:  # numbers with too many digits, for example
        return f"one of {type(value).__name__}"


def check_number(function: str, name: str, value: Any, *, positive: bool = True) -> None:
    """Raise TypeError unless an argument is a number, ValueError unless finite and > 0, or >= 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{function}: {name} must be a number, got {_shown(value)}")
    if not math.isfinite(value) or value < 0 or (positive and not value):
        rule = "positive and finite" if positive else ">= 0 and finite"
        raise ValueError(f"{function}: {name} must be {rule}, got {value}")
