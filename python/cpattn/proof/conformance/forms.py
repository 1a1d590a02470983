# SPDX-License-Identifier: Apache-2.0
"""The form of what an operator returned, in the process that it runs in."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cases import Case
from .judgement import Result


def checked(case: Case, out: Any, lse: Any) -> Result:
    """The answer as arrays, or what is wrong with its form."""
    rows, heads = sum(case.q_lens), case.num_heads
    for name, x, shape in (
        ("out", out, (rows, heads, case.v_head_dim)),
        ("lse", lse, (rows, heads)),
    ):
        if x is None and name == "lse":
            continue
        found = tuple(getattr(x, "shape", ()))
        if len(found) != len(shape) or found[0] < rows or found[1:] != shape[1:]:
            what = f"of shape {list(found)}" if hasattr(x, "shape") else type(x).__name__
            message = f"{name} must have shape {list(shape)}, got one {what}"
            return Result(case, "wrong-form", message=message)
    dtype = str(getattr(out, "dtype", "")).rpartition(".")[2]
    if dtype != case.dtype:
        message = f"out must be {case.dtype} as the queries are, got {dtype or type(out).__name__}"
        return Result(case, "wrong-form", message=message)
    return Result(
        case, "answered", array_of(out)[:rows], None if lse is None else array_of(lse)[:rows]
    )


def array_of(x: Any) -> Any:
    """float64, of a torch or NumPy tensor."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, np.float64).copy()
