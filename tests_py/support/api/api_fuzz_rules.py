# SPDX-License-Identifier: Apache-2.0
"""Rules for the errors and results of a call."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from support.api.argument_kinds import Call, Target

LARGE = 1 << 21  # larger arrays, in bytes, are not checked
MOST_SCALE = 1e6  # largest ordinary scale of scores
ORDINARY = 1e30  # a result beyond this does not come from ordinary numbers


@dataclass
class Case:
    target: Target
    good: Call
    arguments: dict[str, Any]
    changed: list[str]
    owned: list[Any]  # arrays of the caller, before other objects wrap them


ALLOWED = (TypeError, ValueError, MemoryError, BufferError)
# Error of an object without a constructor call; its attributes name no function.
NO_VALUE = "this object has no value: it was never constructed"
# Words of errors that Python itself raises for a call, before the function runs.
OF_CALLS = ("unexpected keyword", "multiple values", "required", "positional", "incompatible")


def check_error(case: Case, error: Exception) -> str | None:
    message = str(error)
    allowed = (*ALLOWED, *case.good.errors)
    if not isinstance(error, allowed) or isinstance(error, UnicodeError):
        return f"an error that is not documented: {error!r:.300}"
    if isinstance(error, MemoryError):
        return None
    if any(text in message for text in OF_CALLS) and "nonsense" in case.arguments:
        return None
    if len(message) > 1000:
        return f"a message of {len(message)} characters"
    if message == NO_VALUE and isinstance(error, TypeError):
        return None
    if not message.startswith((case.target.name, *case.good.prefixes)):
        return f"does not begin with the function's name: {type(error).__name__}: {message:.300}"
    rest = message.partition(": ")[2] or message
    if message.startswith(case.good.prefixes or "\0"):
        rest = message  # the message does not begin with the function's name
    if not any(name in rest for name in (*case.good.arguments, *case.good.names)):
        return f"names no argument: {message:.300}"
    return None


def ordinary(values: Any, depth: int = 0) -> bool:
    """Return whether all numbers in the values are finite and of a usual size."""
    if isinstance(values, torch.Tensor):
        if values.layout is not torch.strided or values.is_meta or values.is_nested:
            return False
        values = values.detach()
        if values.numel() > LARGE or not values.is_floating_point():
            return values.numel() <= LARGE and values.dtype is not torch.uint8
        return bool((values.double().abs() < ORDINARY).all())
    if isinstance(values, np.ndarray):
        if values.size > LARGE:
            return False
        if values.dtype == np.uint8:  # bytes of rows; some mean NaN in other formats
            return not values.any()
        if values.dtype.kind not in "fV" or values.dtype.names:
            return values.dtype.kind in "biu"
        return bool((np.abs(values.astype(np.float64)) < ORDINARY).all())
    if isinstance(values, float):
        return abs(values) < ORDINARY and (values == 0 or abs(values) > 1 / ORDINARY)
    if isinstance(values, int):
        return abs(values) < 2**31
    if isinstance(values, (str, type(None))):
        return True
    if isinstance(values, (list, tuple)) and depth < 3:
        return all(ordinary(value, depth + 1) for value in list(values)[:100])
    return type(values).__module__.startswith("cpattn")


def has_garbage(result: Any) -> bool:
    """Return whether a result has NaN or a number that is too large; -inf stands for no key."""
    if isinstance(result, (list, tuple)):
        return any(map(has_garbage, result))
    if isinstance(result, torch.Tensor) and result.is_floating_point():
        result = result.detach().double().numpy()
    if not isinstance(result, np.ndarray) or result.dtype.kind not in "fV" or result.dtype.names:
        return False
    numbers = result.astype(np.float64)
    return bool((np.isnan(numbers) | (numbers > ORDINARY)).any())
