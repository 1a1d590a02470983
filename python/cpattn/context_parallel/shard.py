# SPDX-License-Identifier: Apache-2.0
"""A rank's rows of a tensor over the tokens of a batch, and the tensor again of all ranks' rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _core
from .._containers import tensor_of, torch_of
from .._core import ContextParallelMetadata
from .._types import AnyTensor, TensorT

__all__ = ["shard", "unshard"]


def shard(
    self: ContextParallelMetadata, x: TensorT, dim: int = 0, *, truncate: bool = False
) -> TensorT:
    """Take this rank's rows of a tensor over the tokens of the batch.

    Parameters
    ----------
    x : tensor, total_seq_lens rows along `dim`
        Hidden states, positions, ... With `truncate` it may have more rows, which are
        ignored.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, per_rank_actual_token[cp_rank] rows along `dim`
        ``x[local_q_indices]``; rows of physical padding are zeros.
    """
    tensor = tensor_of(x, "shard", "x")
    dim = _checked_dim("shard", tensor, dim)
    truncate = _core.flag(truncate, "shard", "truncate")
    rows, wanted = tensor.shape[dim], self.total_seq_lens
    if rows != wanted and not (truncate and rows > wanted):
        rule = "at least " if truncate else ""
        raise ValueError(
            f"shard: x must have {rule}total_seq_lens = {wanted} rows along dim {dim}, got {rows}"
        )
    local = _take(tensor, self.local_q_indices, dim)
    padding = self.per_rank_actual_token[self.cp_rank] - local.shape[dim]
    sharded: TensorT = _append_zeros(local, padding, dim) if padding else local
    return sharded


def unshard(self: ContextParallelMetadata, parts: Sequence[TensorT], dim: int = 0) -> TensorT:
    """Put the tensor over all tokens together from every rank's rows: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of cp_size tensors
        Rows of each rank in rank order, at least the logical rows of the rank along `dim`;
        further rows are padding and ignored.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, total_seq_lens rows along `dim`
    """
    tensors = _checked_parts(parts, self.cp_size)
    first = tensors[0]
    dim = _checked_dim("unshard", first, dim)
    logical = []
    for rank, (part, wanted) in enumerate(zip(tensors, self._logical_rows(), strict=True)):
        if part.ndim != first.ndim or part.shape[dim] < wanted:
            raise ValueError(
                f"unshard: parts: the part of rank {rank} must have {first.ndim} dimensions and "
                f"at least {wanted} rows along dim {dim}, got shape {tuple(part.shape)}"
            )
        if _rest(part, dim) != _rest(first, dim):
            raise ValueError(
                f"unshard: parts must have one shape but for dim {dim}, got {tuple(part.shape)} "
                f"of rank {rank} beside {tuple(first.shape)} of rank 0"
            )
        logical.append(part[(slice(None),) * dim + (slice(wanted),)])
    with _core.TraceSpan(_core.TraceScope.gather):
        whole: TensorT = _take(_concatenate(logical, dim), self._gathered_row_indices(), dim)
    return whole


def _checked_parts(parts: Sequence[AnyTensor], cp_size: int) -> list[AnyTensor]:
    try:
        count = len(parts)  # before all of a large tensor becomes a list
        given = list(parts) if count == cp_size else []
    except Exception as error:  # NotImplementedError of memoryviews of records, say
        raise TypeError(
            f"unshard: parts must be a sequence of tensors, got {type(parts).__name__}"
        ) from error
    if len(given) != cp_size:
        raise ValueError(f"unshard: parts must hold cp_size = {cp_size} tensors, got {count}")
    tensors = [tensor_of(part, "unshard", "parts") for part in given]
    if len({torch_of(tensor) is None for tensor in tensors}) > 1:
        raise TypeError("unshard: parts must be all tensors of torch or none, got both")
    return tensors


def _rest(x: AnyTensor, dim: int) -> tuple[int, ...]:
    """The shape without a dimension."""
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
    # A copy, because torch warns of read-only arrays.
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
