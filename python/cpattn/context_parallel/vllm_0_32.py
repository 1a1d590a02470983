# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism (PCP) with the rule and the names of vLLM 0.32.

Every prefill of L new tokens is cut into ``2 * pcp_size`` chunks of ``ceil(L / (2 * pcp_size))``,
of which the last ones may be short or empty, and rank r has chunks r and ``2 * pcp_size - 1 - r``.
This is another rule than ``strategy="zigzag"`` of `cpattn.build_cp_metadata`, whose blocks differ
by at most one token: of 18 tokens, two ranks have chunks of 5, 5, 5, 3 here and of 5, 5, 4, 4
there. Decodes are whole, on one rank in turn or on all of them; on each rank they come first.
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
    """Rows of one rank, in segments of consecutive tokens of a request, in the order of the rows.

    Attributes
    ----------
    request : array [n], int64
        Request of each segment (``global_batch_req_idx`` of vLLM's ``RankSegment``).
    batch_start, batch_stop : array [n], int64
        Its tokens among the new ones of the whole batch (``global_batch_slice``).
    rank_start, rank_stop : array [n], int64
        Its rows on the rank (``rank_local_batch_slice``).

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
        New tokens of each request; one without any has no segment.
    prefix_lens : ints [bs]
        Cached tokens of each request.
    pcp_size : int
        Ranks that share prefills, at most 2**15.
    is_prefill : bools [bs], optional
        Whether each request still computes its prompt. vLLM compares the tokens computed so far
        with the length of the prompt, which lengths of a batch alone do not tell. Without it, a
        request with one new token behind cached ones is a decode, and every other one a prefill.
        Say it where the last token of a prompt is computed alone, and where decodes have several
        new tokens, as under speculation.
    shard_decode : bool
        Whether each decode has one rank, in turn by their order in the batch, or is on all of them.
        This is vLLM's ``pcp_shard_decode_requests``, which is true where ranks have all keys each;
        with a `dcp_size` above 1 it is false there, so it makes no difference here.
    dcp_size : int
        Ranks that share the keys of each token (decode context parallelism), at most 2**15. Above
        1, prefills too short to fill ``2 * pcp_size`` chunks are on all ranks, too.

    Returns
    -------
    list of RankSegments
        For each rank five arrays, in the order of its rows: decodes, then prefills, both by
        request. A rank may have none.

    Raises
    ------
    TypeError
        For lengths or sizes that are no integers, and flags that are no bools.
    ValueError
        For negative lengths, lists of different length, and sizes out of bounds.

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
    """Lay out a batch over ranks: segments, padding, and the way there and back.

    Parameters
    ----------
    extend_lens, prefix_lens, pcp_size, is_prefill, shard_decode, dcp_size
        As of `pcp_segments`.
    padded_num_tokens : int, optional
        Rows of each rank, at least those of the longest, which is the default; engines have more
        for graphs of fixed size.

    Returns
    -------
    PCPLayout

    Raises
    ------
    TypeError, ValueError
        As of `pcp_segments`, and for fewer rows than a rank has.

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
        Which rank's.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, padded_num_tokens rows along `dim`
        Zeros where the rank has no token.
    """
    rank = _core.integer(pcp_rank, "shard", "pcp_rank")
    if not 0 <= rank < self.pcp_size:
        raise ValueError(f"shard: pcp_rank must be in [0, {self.pcp_size}), got {rank}")
    padding = self.padded_num_tokens - self.per_rank_num_tokens[rank]
    size = ("num_tokens", self.num_tokens)
    return rows_of("shard", x, dim, lambda: self._local_q_indices(rank), padding, size)


def unshard(self: PCPLayout, parts: Sequence[TensorT], dim: int = 0) -> TensorT:
    """Put the tensor over the batch together of every rank's rows: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of pcp_size tensors
        Of each rank at least padded_num_tokens rows along `dim`; further ones are ignored.
    dim : int
        The token dimension.

    Returns
    -------
    tensor, num_tokens rows along `dim`
        Of a request that all ranks have, the rows of rank 0.
    """
    counts, size = [self.padded_num_tokens] * self.pcp_size, ("pcp_size", self.pcp_size)
    return tokens_of("unshard", parts, dim, counts, lambda: self.hidden_restore_idx, size)


# Not a subclass: the core makes these values, and would have to know it.
PCPLayout.segments = property(_segments)  # type: ignore[assignment, method-assign]
PCPLayout.shard = shard  # type: ignore[method-assign]
PCPLayout.unshard = unshard  # type: ignore[method-assign]
RankSegments.__module__ = PCPLayout.__module__ = __name__
PCPLayout.__doc__ = """Rows of all ranks under prefill context parallelism, and their padding.

Made by `build_pcp_layout`, and the same on every rank. A value: it can be compared, hashed, pickled
and printed, and its arrays are read-only. Padded rows are those of all ranks, ``padded_num_tokens``
of each, one rank after the other, as an all-gather puts them together.

Attributes
----------
pcp_size, dcp_size : int
    Ranks that share prefills, and ranks that share the keys of each token.
shard_decode : bool
    Whether each decode has one rank; false where `dcp_size` is above 1.
num_tokens, padded_num_tokens : int
    New tokens of the batch, and rows of each rank.
per_rank_num_tokens : list of int [pcp_size]
    Rows of each rank that are tokens.
replicated : array [bs], bool
    Whether all ranks have all new tokens of each request.
segments : list of RankSegments [pcp_size]
    As of `pcp_segments`; computed on each access, as all that follows.
seq_lens : list of arrays [n], int64
    For each rank the keys that the last token of each segment sees; with the lengths of the
    segments, what attention of causal sequences takes.
hidden_restore_idx : array [num_tokens], int64
    The padded row of each token of the batch, on rank 0 where several have it.
padded_gather_idx : array [pcp_size * padded_num_tokens], int64
    The token of each padded row, 0 for padding.
gathered_kv_write_mask : array [pcp_size * padded_num_tokens], bool
    Whether keys and values of each padded row are written: of every token once, and no padding.

Examples
--------
>>> layout = build_pcp_layout([7, 1], [0, 5], pcp_size=2, shard_decode=False)
>>> layout
PCPLayout(pcp_size=2, dcp_size=1, num_tokens=8, padded_num_tokens=5, per_rank_num_tokens=[4, 5])
>>> layout.hidden_restore_idx.tolist()
[1, 2, 6, 7, 8, 9, 3, 0]
>>> layout.gathered_kv_write_mask.astype(int).tolist()
[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]

With ``dcp_size=2``, DCP rank 1 keeps of the keys of each segment of PCP rank 0:

>>> from cpattn.kv import TokenInterleave
>>> layout = build_pcp_layout([7, 1], [0, 5], pcp_size=2, dcp_size=2)
>>> TokenInterleave(shard_size=2, interleave=1).local_lens(layout.seq_lens[0], rank=1)
array([3, 1, 3])
"""
