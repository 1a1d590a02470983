# SPDX-License-Identifier: Apache-2.0
"""Blocks of keys in place of single ones: which each query attends to, also over several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _core
from .._containers import empty
from .._types import Indices, Tensor

__all__ = ["SelectedBlocks", "merge_blocks", "select_blocks"]


class SelectedBlocks(NamedTuple):
    """Blocks that queries attend to.

    Attributes
    ----------
    blocks : tensor [num_tokens, topk], int32
        Numbers of blocks within the sequence, ascending; -1 behind the last.
    block_scores : tensor [num_tokens, topk], float32
        The score of each, infinity for those that are always selected; -infinity behind the last.

    Examples
    --------
    >>> import numpy as np
    >>> score = np.array([[3, 1, 7, 2, 5, 0, 0]], np.float32)
    >>> selected = select_blocks(score, lengths=[7], topk=2, block_size=2)
    >>> selected.blocks, selected.block_scores
    (array([[1, 3]], dtype=int32), array([[ 7., inf]], dtype=float32))
    """

    blocks: Any
    block_scores: Any


def select_blocks(
    score: Tensor,
    *,
    lengths: Indices,
    topk: int,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    dcp_rank: int = 0,
    dcp_size: int = 1,
) -> SelectedBlocks:
    """Select the blocks of keys that each query attends to, as MiniMax-M3 does.

    The score of a block is the largest score of the keys in it that the query may see. The first
    `init_blocks` and the last `local_blocks` that it may see are always selected. A block whose
    scores are all -infinity never is, NaN counts as -infinity, and of equal blocks the earlier is
    selected. Heads that select for themselves are rows of their own.

    Under decode context parallelism each rank has the keys of blocks of its own,
    ``TokenInterleave(shard_size=dcp_size, interleave=block_size)``, and selects `topk` among these;
    `merge_blocks` of all ranks' blocks has those that one rank alone would select.

    Parameters
    ----------
    score : tensor [num_tokens, num_keys], float32
        Scores of the keys that the rank has, in the order of their positions, such as those of
        `indexer_logits`; what is behind the visible ones may be anything.
    lengths : ints [num_tokens]
        Keys of the sequence that each query may see, on all ranks: its position + 1.
    topk : int
        Blocks for each query, at least 1.
    block_size : int
        Keys of a block.
    init_blocks, local_blocks : int
        Blocks at the beginning, and up to the query's own, that are always selected; at most `topk`
        together.
    dcp_rank, dcp_size : int
        The rank, and how many share the keys; block b is on rank ``b % dcp_size``.

    Returns
    -------
    SelectedBlocks
        In the container of `score`.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        For a `score` that is not float32 with two dimensions, or has fewer keys than a query may
        see of the rank's; numbers below the least; more blocks that are always selected than
        `topk`; and a rank outside ``[0, dcp_size)``.

    Examples
    --------
    Ten keys in blocks of two, on two ranks; the query's own block is the last, on rank 0:

    >>> import numpy as np, cpattn
    >>> score = np.array([[3, 1, 7, 2, 5, 0, 4, 6, 1, 0]], np.float32)
    >>> own = [score[:, [0, 1, 4, 5, 8, 9]], score[:, [2, 3, 6, 7]]]
    >>> options = {"lengths": [10], "topk": 3, "block_size": 2, "dcp_size": 2}
    >>> parts = [select_blocks(keys, dcp_rank=rank, **options) for rank, keys in enumerate(own)]
    >>> parts[0].blocks, parts[1].blocks
    (array([[0, 2, 4]], dtype=int32), array([[ 1,  3, -1]], dtype=int32))
    >>> both = [np.concatenate(columns, axis=1) for columns in zip(*parts)]  # all_gather
    >>> merge_blocks(*both, topk=3).blocks
    array([[1, 3, 4]], dtype=int32)
    """
    function = "select_blocks"
    topk = _core.integer(topk, function, "topk")
    rows = _core.shape_of(score, function, "score", 2)[0]
    out = _results(function, score, rows, topk)
    _core.select_blocks(
        score, lengths, topk, block_size, init_blocks, local_blocks, dcp_rank, dcp_size, *out
    )
    return out


def merge_blocks(blocks: Tensor, block_scores: Tensor, topk: int) -> SelectedBlocks:
    """Select the best of blocks that were selected of parts of the keys, such as those of ranks.

    Parameters
    ----------
    blocks : tensor [num_tokens, n], int32
        `SelectedBlocks.blocks` of all parts, one behind the other. Negative ones are none; a block
        that is there twice counts once, with its larger score.
    block_scores : tensor [num_tokens, n], float32
        Their scores.
    topk : int
        Blocks for each query, at least 1; at most as many as were selected of each part, or blocks
        may be missing.

    Returns
    -------
    SelectedBlocks
        Bit for bit what `select_blocks` of all keys returns.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        If shapes or dtypes are others, or `topk` is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> blocks = np.array([[0, 4, 1, 3]], np.int32)
    >>> merge_blocks(blocks, np.array([[3, 9, 7, 6]], np.float32), topk=2).blocks
    array([[1, 4]], dtype=int32)
    """
    function = "merge_blocks"
    topk = _core.integer(topk, function, "topk")
    rows = _core.shape_of(blocks, function, "blocks", 2)[0]
    out = _results(function, blocks, rows, topk)
    _core.merge_blocks(blocks, block_scores, topk, *out)
    return out


def _results(function: str, like: Tensor, rows: int, topk: int) -> SelectedBlocks:
    shape = rows, max(topk, 0)  # the core refuses those below 1
    return SelectedBlocks(*(empty(function, like, shape, kind) for kind in ("int32", "float32")))


SelectedBlocks.__module__ = "cpattn.sparse"
