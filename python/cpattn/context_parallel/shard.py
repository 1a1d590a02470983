# SPDX-License-Identifier: Apache-2.0
"""Rows of one rank taken from a tensor over all tokens, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import _core
from .._containers import tensor_of, torch_of
from .._core import ContextParallelMetadata
from .._types import AnyTensor, TensorT

# Rows to take, as many as tokens: made only after the tensor has been checked.
_Rows: TypeAlias = Callable[[], np.ndarray[Any, Any]]


def shard(
    self: ContextParallelMetadata, x: TensorT, dim: int = 0, *, truncate: bool = False
) -> TensorT:
    """Take this rank's rows of a tensor over the tokens of the batch.

    Parameters
    ----------
    x : tensor, total_seq_lens rows along `dim`
        Hidden states, positions, ... With `truncate`, further rows are allowed and ignored.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, per_rank_actual_token[cp_rank] rows along `dim`
        ``x[local_q_indices]``; rows of physical padding are zeros.
    """
    padding = self.per_rank_actual_token[self.cp_rank] - self._logical_rows()[self.cp_rank]
    size = ("total_seq_lens", self.total_seq_lens)
    return rows_of("shard", x, dim, lambda: self.local_q_indices, padding, size, truncate=truncate)


def unshard(self: ContextParallelMetadata, parts: Sequence[TensorT], dim: int = 0) -> TensorT:
    """Reassemble the tensor over all tokens from every rank's rows: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of cp_size tensors
        Rows of each rank in rank order along `dim`, at least its logical rows; further rows are
        padding and ignored.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, total_seq_lens rows along `dim`
    """
    counts, size = self._logical_rows(), ("cp_size", self.cp_size)
    return tokens_of("unshard", parts, dim, counts, self._gathered_row_indices, size)


def rows_of(
    function: str,
    x: TensorT,
    dim: int,
    indices: _Rows,
    padding: int,
    size: tuple[str, int],
    *,
    truncate: bool = False,
) -> TensorT:
    """Take rows of `x` and append rows of zeros; `size` names the expected length in errors."""
    tensor = tensor_of(x, function, "x")
    dim = _checked_dim(function, tensor, dim)
    truncate = _core.flag(truncate, function, "truncate")
    name, wanted = size
    rows = tensor.shape[dim]
    if rows != wanted and not (truncate and rows > wanted):
        rule = "at least " if truncate else ""
        raise ValueError(
            f"{function}: x must have {rule}{name} = {wanted} rows along dim {dim}, got {rows}"
        )
    local = _take(tensor, indices(), dim)
    taken: TensorT = _append_zeros(local, padding, dim) if padding else local
    return taken


def tokens_of(
    function: str,
    parts: Sequence[TensorT],
    dim: int,
    counts: Sequence[int],
    indices: _Rows,
    size: tuple[str, int],
) -> TensorT:
    """Take rows of the first `counts` rows of each part; `size` names the expected part count."""
    tensors = _checked_parts(function, parts, size)
    first = tensors[0]
    dim = _checked_dim(function, first, dim)
    counted = []
    for rank, (part, wanted) in enumerate(zip(tensors, counts, strict=True)):
        if part.ndim != first.ndim or part.shape[dim] < wanted:
            raise ValueError(
                f"{function}: parts: the part of rank {rank} must have {first.ndim} dimensions and "
                f"at least {wanted} rows along dim {dim}, got shape {tuple(part.shape)}"
            )
        if _rest(part, dim) != _rest(first, dim):
            raise ValueError(
                f"{function}: parts must have one shape but for dim {dim}, got {tuple(part.shape)} "
                f"of rank {rank} beside {tuple(first.shape)} of rank 0"
            )
        counted.append(part[(slice(None),) * dim + (slice(wanted),)])
    with _core.TraceSpan(_core.TraceScope.gather):
        whole: TensorT = _take(_concatenate(counted, dim), indices(), dim)
    return whole


def _checked_parts(
    function: str, parts: Sequence[AnyTensor], size: tuple[str, int]
) -> list[AnyTensor]:
    name, wanted = size
    try:
        count = len(parts)  # before a large tensor is split into a list
        given = list(parts) if count == wanted else []
    except Exception as error:  # such as NotImplementedError of memoryviews of records
        raise TypeError(
            f"{function}: parts must be a sequence of tensors, got {type(parts).__name__}"
        ) from error
    if len(given) != wanted:
        raise ValueError(f"{function}: parts must hold {name} = {wanted} tensors, got {count}")
    tensors = [tensor_of(part, function, "parts") for part in given]
    if len({torch_of(tensor) is None for tensor in tensors}) > 1:
        raise TypeError(f"{function}: parts must be all tensors of torch or none, got both")
    return tensors


def _rest(x: AnyTensor, dim: int) -> tuple[int, ...]:
    """Return the shape without one dimension."""
    return (*x.shape[:dim], *x.shape[dim + 1 :])


def _checked_dim(function: str, x: AnyTensor, dim: int) -> int:
    dim = _core.integer(dim, function, "dim")
    if x.ndim == 0:
        raise ValueError(f"{function}: x and parts must have dimensions, got a tensor of none")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{function}: dim must be in [{-x.ndim}, {x.ndim}), got {dim}")
    return dim % x.ndim


def _take(x: AnyTensor, indices: np.ndarray[Any, Any], dim: int) -> AnyTensor:
    torch = torch_of(x)
    if torch is None:
        return x.take(indices, axis=dim)
    # A copy, as torch warns about read-only arrays.
    return x.index_select(dim, torch.from_numpy(indices.copy()).to(x.device))


def _concatenate(parts: Sequence[AnyTensor], dim: int) -> AnyTensor:
    torch = torch_of(parts[0])
    if torch is None:
        return np.concatenate(parts, axis=dim)
    return torch.cat(parts, dim)


def _append_zeros(x: AnyTensor, rows: int, dim: int) -> AnyTensor:
    shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
    torch = torch_of(x)
    zeros = np.zeros(shape, x.dtype) if torch is None else x.new_zeros(shape)
    return _concatenate([x, zeros], dim)
