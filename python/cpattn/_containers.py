# SPDX-License-Identifier: Apache-2.0
"""Results in the container of the arguments: torch in, torch out; NumPy in, NumPy out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from ._types import AnyTensor


def torch_of(x: AnyTensor) -> Any | None:
    """The torch module if x is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def empty(
    function: str, like: AnyTensor, shape: Sequence[int], dtype: str | None = None
) -> AnyTensor:
    """An uninitialised tensor in the container of `like`, of its dtype unless one is named.

    MemoryError, which names `function`, for a shape that cannot be had.
    """
    torch = torch_of(like)
    if dtype is None:
        array = torch is not None or isinstance(like, np.ndarray)
        kind = like.dtype if array else numpy_dtype(_core.dtype_of(like, function, "like"))
    else:
        kind = numpy_dtype(dtype) if torch is None else getattr(torch, dtype)
    try:
        if torch is None:
            return np.empty(shape, kind)
        if 0 in shape and kind.itemsize * math.prod(max(size, 1) for size in shape) > sys.maxsize:
            raise OverflowError  # torch would let its strides wrap
        return like.new_empty(shape, dtype=kind)
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError) as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # of a signal handler, which ran meanwhile
        raise MemoryError(f"{function}: no memory for a result of shape {list(shape)}") from error


def need_scales(
    function: str, cache: AnyTensor, kv_dtype: str | None = None, **scales: Any
) -> None:
    """Refuse keys of int8 without one of the scales: as numbers such codes reach to 127."""
    missing = [name for name, scale in scales.items() if scale is None]
    of_codes = isinstance(kv_dtype, str) and kv_dtype == "int8"
    if not missing or not (kv_dtype is None or of_codes):
        return  # the core refuses what is no name
    torch = torch_of(cache)  # looked at itself, for it is asked in every call
    if (
        of_codes
        or (torch is not None and cache.dtype is torch.int8)
        or (torch is None and _core.dtype_of(cache, function, "k_cache") == "int8")
    ):
        _core.refuse_missing_scale(function, missing[0])


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name; ImportError if it needs ml_dtypes, which is not there."""
    # NumPy knows these once this is imported.
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        try:
            import ml_dtypes  # noqa: F401
        except ImportError as error:
            raise ImportError(f"NumPy arrays of {name} need: pip install ml_dtypes") from error
    return np.dtype(name)


def as_numpy(x: AnyTensor) -> np.ndarray[Any, Any]:
    """x itself if it is a NumPy array, else a view of it through __dlpack__."""
    return x if isinstance(x, np.ndarray) else np.from_dlpack(x)


def tensor_of(x: AnyTensor, function: str, argument: str) -> AnyTensor:
    """x as a torch tensor, on any device, or a NumPy array of any dtype.

    For functions that move rows and compute nothing; what the core reads it checks itself.
    """
    name = f"{function}: {argument}"
    torch = torch_of(x)
    if torch is not None:
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got a tensor that is nested or {x.layout}")
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would have no effect")
    if isinstance(x, np.ndarray):
        return x
    try:
        return np.from_dlpack(x)
    except Exception as error:
        raise TypeError(
            f"{name} must be a tensor (torch, NumPy, or anything with __dlpack__), "
            f"got {type(x).__name__}"
        ) from error
