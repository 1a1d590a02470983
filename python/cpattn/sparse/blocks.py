# SPDX-License-Identifier: Apache-2.0
"""Selection of key blocks that each query attends to, also over several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _core
from .._containers import empty
from .._types import Indices, Tensor


class SelectedBlocks(NamedTuple):
    """Key blocks that queries attend to.

    Attributes
    ----------
    blocks : tensor [num_tokens, topk], int32
        Block numbers within the sequence, ascending; -1 after the last.
    block_scores : tensor [num_tokens, topk], float32
        Score of each block, infinity if it is always selected; -infinity after the last.

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

    The score of a block is the largest score of its visible keys. The first `init_blocks` and the
    last `local_blocks` visible blocks are always selected. A block with only -infinity scores is
    never selected, NaN counts as -infinity, and ties go to the earlier block. If heads select
    separately, each head has rows of its own.

    Under decode context parallelism each rank has its own blocks of keys,
    ``TokenInterleave(shard_size=dcp_size, interleave=block_size)``, and selects `topk` of them;
    `merge_blocks` of all ranks' blocks gives the selection of a single rank with all keys.

    Parameters
    ----------
    score : tensor [num_tokens, num_keys], float32
        Scores of the rank's keys in the order of their positions, such as those of
        `indexer_logits`; scores after the visible keys may have any value.
    lengths : ints [num_tokens]
        Visible keys of each query on all ranks: its position + 1.
    topk : int
        Blocks per query, at least 1.
    block_size : int
        Keys per block.
    init_blocks, local_blocks : int
        Blocks at the beginning, and up to the query's own, that are always selected; at most `topk`
        together.
    dcp_rank, dcp_size : int
        This rank, and the number of ranks that share the keys; block b is on rank ``b % dcp_size``.

    Returns
    -------
    SelectedBlocks
        Selection in the container of `score`.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        If `score` is not float32 with two dimensions or lacks visible keys of the rank, a number is
        too small, more blocks than `topk` are always selected, or the rank is outside
        ``[0, dcp_size)``.

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
    """Merge blocks that were selected from parts of the keys, such as the parts of ranks.

    Parameters
    ----------
    blocks : tensor [num_tokens, n], int32
        `SelectedBlocks.blocks` of all parts, side by side. Negative entries are no blocks; a block
        that comes twice counts once, with its larger score.
    block_scores : tensor [num_tokens, n], float32
        Scores of the blocks.
    topk : int
        Blocks per query, at least 1, and at most the number selected from each part; with more,
        blocks may be missing.

    Returns
    -------
    SelectedBlocks
        Bitwise the result of `select_blocks` on all keys.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type than stated, shapes or dtypes do not fit, or `topk` is
        below 1.

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
    shape = rows, max(topk, 0)  # the core refuses topk < 1
    return SelectedBlocks(*(empty(function, like, shape, kind) for kind in ("int32", "float32")))


SelectedBlocks.__module__ = "cpattn.sparse"
