# SPDX-License-Identifier: Apache-2.0
"""Results in the container of the arguments: torch in, torch out; NumPy in, NumPy out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

Tensor = Any  # torch.Tensor, numpy.ndarray, or anything with __dlpack__


def torch_of(x: Tensor) -> Any | None:
    """The torch module if x is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def empty(like: Tensor, shape: Sequence[int], dtype: str | None = None) -> Tensor:
    """An uninitialised tensor in the container of `like`, of its dtype unless one is named."""
    torch = torch_of(like)
    if torch is not None:
        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else like.dtype)
    return np.empty(shape, dtype=numpy_dtype(dtype) if dtype else as_numpy(like).dtype)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name; ImportError if it needs ml_dtypes, which is not there."""
    if name in ("bfloat16", "float8_e4m3fn"):  # NumPy knows them once this is imported
        try:
            import ml_dtypes  # noqa: F401
        except ImportError as error:
            raise ImportError(f"NumPy arrays of {name} need: pip install ml_dtypes") from error
    return np.dtype(name)


def as_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """x itself if it is a NumPy array, else a view of it through __dlpack__."""
    return x if isinstance(x, np.ndarray) else np.from_dlpack(x)


def shape_of(x: Tensor, name: str, rank: int | None = None) -> tuple[int, ...]:
    """The shape of a tensor; TypeError for what has none, ValueError for another rank.

    `name` reads "function: argument".
    """
    shape = getattr(x, "shape", None)
    if shape is None:
        raise TypeError(
            f"{name} must be a tensor (torch CPU, NumPy, or anything with __dlpack__), "
            f"got {type(x).__name__}"
        )
    if rank is not None and len(shape) != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {list(shape)}")
    return tuple(shape)
