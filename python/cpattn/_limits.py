# SPDX-License-Identifier: Apache-2.0
"""Checks that refuse bad numbers instead of reinterpreting or dropping them."""

from __future__ import annotations

from typing import Any

import numpy as np


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
        raise TypeError(f"{function}: {name} must be an integer, got {shown(value)}")
    if value < low:
        raise ValueError(f"{function}: {name} must be >= {low}, got {shown(value)}")
    if high is not None and value > high:
        raise ValueError(f"{function}: {name} must be <= {high}, got {shown(value)}")


def shown(value: object) -> str:
    """Show a value in a message, cut to fit, or else its type."""
    try:
        return f"{value!r:.80}"
    except Exception:  # numbers with too many digits, for example
        return f"one of {type(value).__name__}"
