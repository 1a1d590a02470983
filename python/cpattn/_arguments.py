# SPDX-License-Identifier: Apache-2.0
"""Arguments that Python itself reads, checked as the compiled core checks its own."""

from __future__ import annotations

import numbers
import operator
from typing import Any


def integer(value: Any, function: str, argument: str) -> int:
    """A plain int; TypeError for what is none, bool and float included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{function}: {argument} must be an integer, got {type(value).__name__}")
    return operator.index(value)


def at_least(minimum: int, value: Any, function: str, argument: str) -> int:
    """The same; ValueError below the minimum."""
    number = integer(value, function, argument)
    if number < minimum:
        raise ValueError(f"{function}: {argument} must be >= {minimum}, got {number}")
    return number


def real(value: Any, function: str, argument: str) -> float:
    """A float; TypeError for what is no number, bool included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function}: {argument} must be a number, got {type(value).__name__}")
    return float(value)
