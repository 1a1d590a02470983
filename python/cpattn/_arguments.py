# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that Python itself reads, with the rules of the compiled core."""

from __future__ import annotations

from typing import Any

from . import _core

MAX_SHOWN = 4  # most elements of a list that a repr shows

integer = _core.integer
real = _core.real
flag = _core.flag
key_window = _core.key_window


def at_least(minimum: int, value: Any, function: str, argument: str) -> int:
    """Return a plain int; ValueError below the minimum."""
    number = integer(value, function, argument)
    if number < minimum:
        raise ValueError(f"{function}: {argument} must be >= {minimum}, got {number}")
    return number


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def has(owner: Any, name: str) -> bool:
    """Return whether an object has an attribute; False if the object raises instead."""
    try:
        return hasattr(owner, name)
    except Exception:
        return False


def items(values: Any, function: str, argument: str) -> tuple[Any, ...]:
    """Return the current elements of a sequence; TypeError for anything else."""
    try:
        return tuple(values)
    except Exception as error:
        raise TypeError(
            f"{function}: {argument} must be a sequence, got {type(values).__name__}"
        ) from error


def part(owner: Any, names: str | tuple[str, ...], function: str, argument: str) -> Any:
    """Return an attribute, or a tuple of several; TypeError if an attribute is missing."""
    try:
        if isinstance(names, str):
            return getattr(owner, names)
        return tuple(getattr(owner, name) for name in names)
    except Exception as error:
        what = names if isinstance(names, str) else ", ".join(names)
        raise TypeError(
            f"{function}: {argument} must have {what}, got {type(owner).__name__}"
        ) from error


def shown_list(value: Any) -> str:
    """Return a repr with the first elements of a list."""
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        return f"[{', '.join(map(shown_list, value[:MAX_SHOWN]))}, ... {len(value)} in all]"
    if isinstance(value, list):
        return f"[{', '.join(map(shown_list, value))}]"
    return repr(value)
