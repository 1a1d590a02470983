# SPDX-License-Identifier: Apache-2.0
"""Form of an operator's result, checked in its own process."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cases import Case
from .judgement import Result


class WrongForm(Exception):
    """A result without the form of the signature, with the difference."""


def returned(result: Any, **dims: int | None) -> tuple[Any, ...]:
    """Check that a result is so many tensors with these dimensions, and return them.

    Further results are dropped. Unpacking anything else would raise a ValueError, which would pass
    for a refusal of the operator. None stands for an unchecked result; a log-sum-exp may be None.
    """
    import torch

    if len(dims) == 1:
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) < len(dims):
        count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        names = " and ".join(dims)
        raise WrongForm(f"{names} must be returned, got {type(result).__name__}{count}")
    for (name, dim), x in zip(dims.items(), result, strict=False):
        if dim is None or (x is None and name == "lse"):
            continue
        if not isinstance(x, torch.Tensor):
            raise WrongForm(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != dim:
            raise WrongForm(f"{name} must have {dim} dimensions, got shape {list(x.shape)}")
    return tuple(result[: len(dims)])


def checked(case: Case, out: Any, lse: Any, *, has_lse: bool, device: str) -> Result:
    """Return the answer as arrays, or the fault of its form; `has_lse`: whether `lse` counts."""
    rows, heads = sum(case.q_lens), case.num_heads
    try:
        _check_form("out", out, (rows, heads, case.v_head_dim), (case.dtype,), device)
        if has_lse:
            _check_form("lse", lse, (rows, heads), ("float32", "float64"), device)
    except WrongForm as error:
        return Result(case, "wrong-form", message=str(error))
    return Result(case, "answered", array_of(out)[:rows], array_of(lse)[:rows] if has_lse else None)


def _check_form(
    name: str, x: Any, shape: tuple[int, ...], dtypes: tuple[str, ...], device: str
) -> None:
    """Raise `WrongForm` unless a tensor of torch or NumPy has this form; padding may follow."""
    found = tuple(getattr(x, "shape", ()))
    if len(found) != len(shape) or found[0] < shape[0] or found[1:] != shape[1:]:
        what = f"one of shape {list(found)}" if hasattr(x, "shape") else type(x).__name__
        raise WrongForm(f"{name} must have shape {list(shape)}, got {what}")
    dtype = str(getattr(x, "dtype", "")).rpartition(".")[2]
    if dtype not in dtypes:
        as_queries = " as the queries are" if name == "out" else ""
        raise WrongForm(f"{name} must be {dtypes[0]}{as_queries}, got {dtype or type(x).__name__}")
    place = getattr(getattr(x, "device", None), "type", "")  # NumPy arrays have none
    if place and place != device.partition(":")[0]:
        raise WrongForm(f"{name} must be on {device} as the queries are, got one on {place}")


def array_of(x: Any) -> Any:
    """Return a torch or NumPy tensor as float64."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, np.float64).copy()
