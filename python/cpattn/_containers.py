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
    """Return the torch module if x is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def empty(
    function: str, like: AnyTensor, shape: Sequence[int], dtype: str | None = None
) -> AnyTensor:
    """Return an uninitialized tensor in the container of `like`, by default with its dtype.

    A shape that does not fit into memory raises MemoryError, which names `function`.
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
            raise  # raised by a signal handler that ran meanwhile
        raise MemoryError(f"{function}: no memory for a result of shape {list(shape)}") from error


def need_scales(
    function: str, cache: AnyTensor, kv_dtype: str | None = None, **scales: Any
) -> None:
    """Refuse int8 keys unless both scales are given, as int8 codes reach to 127."""
    missing = [name for name, scale in scales.items() if scale is None]
    of_codes = isinstance(kv_dtype, str) and kv_dtype == "int8"
    if not missing or not (kv_dtype is None or of_codes):
        return  # the core refuses an unknown name
    torch = torch_of(cache)  # checked without helpers, as every call comes here
    if (
        of_codes
        or (torch is not None and cache.dtype is torch.int8)
        or (torch is None and _core.dtype_of(cache, function, "k_cache") == "int8")
    ):
        _core.refuse_missing_scale(function, missing[0])


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; ImportError if the dtype needs ml_dtypes, which is missing."""
    # NumPy knows these dtypes once ml_dtypes is imported.
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        try:
            import ml_dtypes  # noqa: F401
        except ImportError as error:
            raise ImportError(f"NumPy arrays of {name} need: pip install ml_dtypes") from error
    return np.dtype(name)


def as_numpy(x: AnyTensor) -> np.ndarray[Any, Any]:
    """Return x if it is a NumPy array, else a view of it through __dlpack__."""
    return x if isinstance(x, np.ndarray) else np.from_dlpack(x)


def tensor_of(x: AnyTensor, function: str, argument: str) -> AnyTensor:
    """Return x as a torch tensor on any device, or as a NumPy array of any dtype.

    Functions that move rows without computing use it; the core checks the tensors that it reads.
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
