# SPDX-License-Identifier: Apache-2.0
"""Which tokens each rank computes, and how many keys they see: context-parallel metadata.

A batch of sequences, each with new tokens behind a cached prefix, is divided over
``cp_size`` ranks by one of three strategies (aliases in brackets):

``zigzag`` (``in-seq-split``, ``head_tail``, ``dual_chunk_swap``)
    Every sequence is cut into ``2 * cp_size`` blocks, larger ones first, whose sizes
    differ by at most one. Rank r owns block r and block ``2 * cp_size - 1 - r``.
``interleave`` (``round-robin-split``)
    Token t of the flattened batch belongs to rank ``t % cp_size``.
``contiguous``
    Rank r owns tokens ``[L * r // cp_size, L * (r + 1) // cp_size)`` of every sequence.

Balance: the largest difference between two ranks, for W = cp_size and one sequence of L new
tokens behind P cached ones. Over a batch the bounds of its sequences add up at most. Pairs are
the visible (query, key) pairs of causal attention, which is the work.

==========  ======  =======================================================================
strategy    tokens  pairs
==========  ======  =======================================================================
zigzag      1       P + 2 L, so a rank has at most 1 + 4 W / L of the mean; 0 if 2 W divides L
interleave  1       P + L, and over a whole batch the tokens still differ by at most 1
contiguous  1       P + L + (W - 1) ceil(L / W)**2, twice the mean on the last rank if L >> P, W
==========  ======  =======================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from . import _core
from ._containers import Tensor, tensor_of, torch_of
from ._core import ContextParallelMetadata as ContextParallelMetadata

__all__ = [
    "ContextParallelMetadata",
    "ForwardMode",
    "build_cp_metadata",
    "build_cp_metadata_all_ranks",
    "can_apply_cp",
    "can_dsa_prefill_cp_interleave",
]

Indices = Sequence[int] | Any  # list or tuple of int, NumPy or torch CPU int32/int64


class ForwardMode(IntEnum):
    """What a batch is forwarded for, as serving engines name and number it."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    PREBUILT = 7
    SPLIT_PREFILL = 8
    DLLM_EXTEND = 9

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        return _core.is_extend(self, include_draft_extend_v2)

    def is_prefill(self, include_draft_extend_v2: bool = False) -> bool:
        return _core.is_extend(self, include_draft_extend_v2)

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """Whether context parallelism may split the new tokens."""
        return _core.is_context_parallel_extend(self, include_draft_extend_v2)

    def is_extend_without_speculative(self) -> bool:
        return _core.is_extend_without_speculative(self)

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return _core.is_extend_or_draft_extend_or_mixed(self)

    def is_decode_or_idle(self) -> bool:
        return _core.is_decode_or_idle(self)

    def is_cpu_graph(self) -> bool:
        return _core.is_cpu_graph(self)

    def is_cuda_graph(self) -> bool:
        return _core.is_cuda_graph(self)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_prebuilt(self) -> bool:
        return self is ForwardMode.PREBUILT

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND


def build_cp_metadata(
    extend_lens: Indices | None,
    seq_lens: Indices | None = None,
    *,
    cp_rank: int,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    kv_len_convention: str = "baked",
    compat: bool = False,
) -> ContextParallelMetadata:
    """Plan one rank's share of a batch.

    Parameters
    ----------
    extend_lens : int, shape [bs]
        New tokens of each sequence; zero and fewer than ``2 * cp_size`` are allowed
        (`can_apply_cp` is the gate engines ask first).
    seq_lens : int, shape [bs], optional
        Cached prefix plus new tokens. Without it there is no prefix.
    cp_rank, cp_size : int
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias.
    num_tokens : int, optional
        Tokens of the batch with padding: what exceeds the sum of `extend_lens` is counted
        as new tokens of the last sequence, whose prefix stays.
    kv_len_convention : {"baked", "bare"}
        Whether the ``kv_len_*`` fields include the cached prefix.
    compat : bool
        Accept what engines accept: `seq_lens` of another length mean no prefix, a
        sequence with ``seq_lens < extend_lens`` has none, and ``extend_lens=None`` stands
        for `seq_lens`, or else for ``[num_tokens]``.

    Returns
    -------
    ContextParallelMetadata
        Every field of the engines' metadata under its own name: ``*_list`` and the layout
        lists as lists of int, ``*_tensor`` as read-only int32 arrays, None where the
        strategy has no such field.

    Raises
    ------
    ValueError
        Names the argument, the rule, the value and its position.

    Examples
    --------
    >>> plan = build_cp_metadata([10, 14], [15, 14], cp_rank=1, cp_size=2)
    >>> plan.actual_seq_q_prev_list, plan.kv_len_prev_list
    ([3, 4], [11, 8])
    >>> plan.shard(np.arange(24))
    array([ 3,  4,  5, 14, 15, 16, 17,  6,  7, 18, 19, 20])
    """
    return _core.build_cp_metadata(
        extend_lens, seq_lens, cp_rank, cp_size, strategy, num_tokens, kv_len_convention, compat
    )


def build_cp_metadata_all_ranks(
    extend_lens: Indices | None,
    seq_lens: Indices | None = None,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    kv_len_convention: str = "baked",
    compat: bool = False,
) -> list[ContextParallelMetadata]:
    """Plan every rank's share, as `build_cp_metadata` would for each.

    The arrays of all ranks lie in one allocation, with those that do not depend on the
    rank stored once; it lives as long as any of the plans.
    """
    return _core.build_cp_metadata_all_ranks(
        extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat
    )


def can_apply_cp(
    extend_lens: Indices,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    forward_mode: ForwardMode | None = ForwardMode.EXTEND,
) -> bool:
    """Whether a batch is worth splitting over `cp_size` ranks; engines fall back otherwise.

    Pseudo-code::

        cp_size > 1 and forward_mode.is_context_parallel_extend() and
            zigzag:      num_tokens >= 2 * cp_size and min(extend_lens) >= 2 * cp_size
            contiguous:  num_tokens >= cp_size     and min(extend_lens) >= cp_size
            interleave:  sum(extend_lens) >= cp_size

    `num_tokens` defaults to the sum of `extend_lens`. A `forward_mode` of None passes for
    zigzag and contiguous, and does not for interleave.
    """
    return _core.can_apply_cp(extend_lens, cp_size, strategy, num_tokens, forward_mode)


def can_dsa_prefill_cp_interleave(
    extend_lens: Indices, *, cp_size: int, strategy: str, forward_mode: ForwardMode | None
) -> bool:
    """Whether a sparse-attention (DSA) model may split this prefill token by token.

    True for strategy ``interleave``, a context-parallel extend mode, and
    ``sum(extend_lens) >= cp_size > 1``.
    """
    return _core.can_dsa_prefill_cp_interleave(extend_lens, cp_size, strategy, forward_mode)


def _shard(
    self: ContextParallelMetadata, x: Tensor, dim: int = 0, *, truncate: bool = False
) -> Tensor:
    """This rank's rows of a tensor over the tokens of the batch.

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
    x = tensor_of(x, "shard", "x")
    dim = _checked_dim("shard", x, dim)
    truncate = _core.flag(truncate, "shard", "truncate")
    rows, wanted = x.shape[dim], self.total_seq_lens
    if rows != wanted and not (truncate and rows > wanted):
        rule = "at least " if truncate else ""
        raise ValueError(
            f"shard: x must have {rule}total_seq_lens = {wanted} rows along dim {dim}, got {rows}"
        )
    local = _take(x, self.local_q_indices, dim)
    padding = self.per_rank_actual_token[self.cp_rank] - local.shape[dim]
    return _append_zeros(local, padding, dim) if padding else local


def _unshard(self: ContextParallelMetadata, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensor over all tokens, from every rank's rows: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of cp_size tensors
        In rank order, each with at least the logical rows of its rank along `dim`;
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
        return _take(_concatenate(logical, dim), self._gathered_row_indices(), dim)


ContextParallelMetadata.shard = _shard  # type: ignore[method-assign]
ContextParallelMetadata.unshard = _unshard  # type: ignore[method-assign]
_shard.__name__, _unshard.__name__ = "shard", "unshard"
ContextParallelMetadata.__module__ = "cpattn"


def _checked_parts(parts: Sequence[Tensor], cp_size: int) -> list[Tensor]:
    try:
        given = list(parts)
    except (TypeError, NotImplementedError) as error:  # the latter of memoryviews of records
        raise TypeError(
            f"unshard: parts must be a sequence of tensors, got {type(parts).__name__}"
        ) from error
    if len(given) != cp_size:
        raise ValueError(f"unshard: parts must hold cp_size = {cp_size} tensors, got {len(given)}")
    tensors = [tensor_of(part, "unshard", "parts") for part in given]
    if len({torch_of(tensor) is None for tensor in tensors}) > 1:
        raise TypeError("unshard: parts must be all tensors of torch or none, got both")
    return tensors


def _rest(x: Tensor, dim: int) -> tuple[int, ...]:
    """The shape without a dimension."""
    return (*x.shape[:dim], *x.shape[dim + 1 :])


def _checked_dim(function: str, x: Tensor, dim: int) -> int:
    dim = _core.integer(dim, function, "dim")
    if x.ndim == 0:
        raise ValueError(f"{function}: x and parts must have dimensions, got a tensor of none")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{function}: dim must be in [{-x.ndim}, {x.ndim}), got {dim}")
    return dim % x.ndim


def _take(x: Tensor, indices: np.ndarray[Any, Any], dim: int) -> Tensor:
    torch = torch_of(x)
    if torch is None:
        return x.take(indices, axis=dim)
    # A copy, because torch warns of read-only arrays.
    return x.index_select(dim, torch.from_numpy(indices.copy()).to(x.device))


def _concatenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    torch = torch_of(parts[0])
    if torch is None:
        return np.concatenate(parts, axis=dim)
    return torch.cat(parts, dim)


def _append_zeros(x: Tensor, rows: int, dim: int) -> Tensor:
    shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
    torch = torch_of(x)
    zeros = np.zeros(shape, x.dtype) if torch is None else x.new_zeros(shape)
    return _concatenate([x, zeros], dim)
