# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism (PCP) with the rule and the names of vLLM 0.32.

The rule cuts a prefill of L new tokens into ``2 * pcp_size`` chunks of
``ceil(L / (2 * pcp_size))`` tokens; the last ones may be short or empty. Rank r has chunks r and
``2 * pcp_size - 1 - r``. ``strategy="zigzag"`` of `cpattn.build_cp_metadata` differs: its blocks
have equal sizes up to one token. For 18 tokens and two ranks, chunks have 5, 5, 5, 3 tokens here
and 5, 5, 4, 4 there. One rank in turn has a whole decode, or all ranks; decode rows come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import _core
from .._core import PCPLayout as PCPLayout
from .._types import Flags, Indices, TensorT
from .shard import rows_of, tokens_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["PCPLayout", "RankSegments", "build_pcp_layout", "pcp_segments"]


class RankSegments(NamedTuple):
    """Rows of one rank, as segments of consecutive tokens of a request, in row order.

    Attributes
    ----------
    request : array [n], int64
        Request of each segment (``global_batch_req_idx`` of vLLM's ``RankSegment``).
    batch_start, batch_stop : array [n], int64
        Range of the segment among the new tokens of the whole batch (``global_batch_slice``).
    rank_start, rank_stop : array [n], int64
        Range of the segment among the rank's rows (``rank_local_batch_slice``).

    Examples
    --------
    >>> segments = pcp_segments([7], [0], pcp_size=2)
    >>> segments[0].batch_start.tolist(), segments[0].batch_stop.tolist()
    ([0, 6], [2, 7])
    """

    request: Ints
    batch_start: Ints
    batch_stop: Ints
    rank_start: Ints
    rank_stop: Ints


def pcp_segments(
    extend_lens: Indices,
    prefix_lens: Indices,
    *,
    pcp_size: int,
    is_prefill: Flags | None = None,
    shard_decode: bool = True,
    dcp_size: int = 1,
) -> list[RankSegments]:
    """Divide a batch over ranks, as ``PCPManager._build_batch_layout`` of vLLM does.

    Parameters
    ----------
    extend_lens : ints [bs]
        New tokens of each request; a request with 0 has no segment.
    prefix_lens : ints [bs]
        Cached tokens of each request.
    pcp_size : int
        Ranks that share prefills, at most 2**15.
    is_prefill : bools [bs], optional
        Whether each request still computes its prompt. vLLM compares computed tokens with the
        prompt length, which the lengths of a batch do not tell. Default: a request with one new
        token and cached tokens is a decode, and every other request is a prefill. Pass it if the
        last token of a prompt is computed alone, or if decodes have several new tokens, as in
        speculation.
    shard_decode : bool
        Whether each decode goes to one rank, in turn by batch order, or to all ranks. vLLM's
        ``pcp_shard_decode_requests`` is true if every rank has all keys; with a `dcp_size` above 1
        vLLM sets it to false, and this argument then has no effect.
    dcp_size : int
        Ranks that share the keys of each token (decode context parallelism), at most 2**15. Above
        1, prefills too short for ``2 * pcp_size`` chunks also go to all ranks.

    Returns
    -------
    list of RankSegments
        Five arrays for each rank, in row order: decodes, then prefills, both by request. A rank may
        have no rows.

    Raises
    ------
    TypeError
        If lengths or sizes are no integers, or flags are no bools.
    ValueError
        If a length is negative, lists differ in length, or a size is out of bounds.

    Examples
    --------
    A prefill of seven tokens, then a decode behind five cached ones:

    >>> for rank in pcp_segments([7, 1], [0, 5], pcp_size=2):
    ...     print(*(column.tolist() for column in rank))
    [1, 0, 0] [7, 0, 6] [8, 2, 7] [0, 1, 3] [1, 3, 4]
    [0, 0] [2, 4] [4, 6] [0, 2] [2, 4]
    """
    ranks = _core.pcp_segments(
        extend_lens, prefix_lens, pcp_size, is_prefill, shard_decode, dcp_size
    )
    return [RankSegments(*columns) for columns in ranks]


def build_pcp_layout(
    extend_lens: Indices,
    prefix_lens: Indices,
    *,
    pcp_size: int,
    is_prefill: Flags | None = None,
    shard_decode: bool = True,
    dcp_size: int = 1,
    padded_num_tokens: int | None = None,
) -> PCPLayout:
    """Lay out a batch over ranks: segments, padding, and indices for both directions.

    Parameters
    ----------
    extend_lens, prefix_lens, pcp_size, is_prefill, shard_decode, dcp_size
        See `pcp_segments`.
    padded_num_tokens : int, optional
        Rows of each rank. Default and minimum: the rows of the longest rank; engines pad further
        for graphs of fixed size.

    Returns
    -------
    PCPLayout

    Raises
    ------
    TypeError, ValueError
        See `pcp_segments`; also if `padded_num_tokens` is less than the rows of a rank.

    Examples
    --------
    >>> import numpy as np
    >>> layout = build_pcp_layout([7], [0], pcp_size=2)
    >>> parts = [layout.shard(np.arange(1, 8), rank) for rank in range(2)]
    >>> [part.tolist() for part in parts]
    [[1, 2, 7, 0], [3, 4, 5, 6]]
    >>> layout.unshard(parts).tolist()
    [1, 2, 3, 4, 5, 6, 7]
    """
    return _core.build_pcp_layout(
        extend_lens, prefix_lens, pcp_size, is_prefill, shard_decode, dcp_size, padded_num_tokens
    )


def _segments(self: PCPLayout) -> list[RankSegments]:
    """Return the segments of each rank, as `pcp_segments` does."""
    return [RankSegments(*columns) for columns in self._segments()]


def shard(self: PCPLayout, x: TensorT, pcp_rank: int, dim: int = 0) -> TensorT:
    """Take a rank's rows of a tensor over the new tokens of the batch.

    Parameters
    ----------
    x : tensor, num_tokens rows along `dim`
        Token ids, positions, hidden states, ...
    pcp_rank : int
        The rank.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, padded_num_tokens rows along `dim`
        Rows of zeros follow the rank's tokens.
    """
    rank = _core.integer(pcp_rank, "shard", "pcp_rank")
    if not 0 <= rank < self.pcp_size:
        raise ValueError(f"shard: pcp_rank must be in [0, {self.pcp_size}), got {rank}")
    padding = self.padded_num_tokens - self.per_rank_num_tokens[rank]
    size = ("num_tokens", self.num_tokens)
    return rows_of("shard", x, dim, lambda: self._local_q_indices(rank), padding, size)


def unshard(self: PCPLayout, parts: Sequence[TensorT], dim: int = 0) -> TensorT:
    """Reassemble the tensor over the batch from every rank's rows: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of pcp_size tensors
        Rows of each rank, at least padded_num_tokens along `dim`; further rows are ignored.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, num_tokens rows along `dim`
        Rows of rank 0 for a request that all ranks have.
    """
    counts, size = [self.padded_num_tokens] * self.pcp_size, ("pcp_size", self.pcp_size)
    return tokens_of("unshard", parts, dim, counts, lambda: self.hidden_restore_idx, size)


# No subclass: the core makes these values and would have to know it.
PCPLayout.segments = property(_segments)  # type: ignore[assignment, method-assign]
PCPLayout.shard = shard  # type: ignore[method-assign]
PCPLayout.unshard = unshard  # type: ignore[method-assign]
PCPLayout.__module__ = __name__
PCPLayout.__doc__ = """Rows of all ranks under prefill context parallelism, and their padding.

`build_pcp_layout` makes it, the same on every rank. It is a value: comparable, hashable, picklable
and printable, with read-only arrays. Padded rows are the concatenated ``padded_num_tokens`` rows of
all ranks, as an all-gather returns them.

Attributes
----------
pcp_size, dcp_size : int
    Ranks that share prefills, and ranks that share the keys of each token.
shard_decode : bool
    Whether each decode goes to one rank; false if `dcp_size` is above 1.
num_tokens, padded_num_tokens : int
    New tokens of the batch, and rows of each rank.
per_rank_num_tokens : list of int [pcp_size]
    Rows of each rank that are tokens.
replicated : array [bs], bool
    Whether all ranks have all new tokens of each request.
segments : list of RankSegments [pcp_size]
    Result of `pcp_segments`. This attribute and those below are computed on each access.
seq_lens : list of arrays [n], int64
    For each rank, the number of keys that the last token of each segment sees; with the segment
    lengths these are the arguments of causal attention.
hidden_restore_idx : array [num_tokens], int64
    Padded row of each token of the batch, on rank 0 if several ranks have the token.
padded_gather_idx : array [pcp_size * padded_num_tokens], int64
    Token of each padded row, 0 for padding.
gathered_kv_write_mask : array [pcp_size * padded_num_tokens], bool
    Whether to write keys and values of each padded row: one row per token, and no padding.

Examples
--------
>>> layout = build_pcp_layout([7, 1], [0, 5], pcp_size=2, shard_decode=False)
>>> layout
PCPLayout(pcp_size=2, dcp_size=1, num_tokens=8, padded_num_tokens=5, per_rank_num_tokens=[4, 5])
>>> layout.hidden_restore_idx.tolist()
[1, 2, 6, 7, 8, 9, 3, 0]
>>> layout.gathered_kv_write_mask.astype(int).tolist()
[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]

With ``dcp_size=2``, DCP rank 1 keeps these keys of each segment of PCP rank 0:

>>> from cpattn.kv import TokenInterleave
>>> layout = build_pcp_layout([7, 1], [0, 5], pcp_size=2, dcp_size=2)
>>> TokenInterleave(shard_size=2, interleave=1).local_lens(layout.seq_lens[0], rank=1)
array([3, 1, 3])
"""
