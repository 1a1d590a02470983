# SPDX-License-Identifier: Apache-2.0
"""Blocks of keys are those that the indexer of MiniMax-M3 selects, on one rank and on two."""

import numpy as np
import pytest
import torch

import cpattn
from cpattn.kv import TokenInterleave

minimax = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
LENGTH, BLOCK, TOPK = 300, 16, 5


@pytest.fixture(scope="module")
def indexed():
    """Return the scores of all keys, [heads x queries, keys], and the blocks that were selected."""
    config = minimax.MiniMaxM3VLTextConfig(
        hidden_size=32, index_n_heads=2, index_head_dim=16, index_block_size=BLOCK,
        index_topk_blocks=TOPK, index_local_blocks=2,
    )  # fmt: skip
    torch.manual_seed(0)
    indexer = minimax.MiniMaxM3VLIndexer(config, layer_idx=0).eval()
    scores = []
    matmul = torch.matmul

    def kept(q, k):
        scores.append(matmul(q, k))
        return scores[-1]

    angles = torch.rand(1, LENGTH, 16)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "matmul", kept)
        hidden, places = torch.randn(1, LENGTH, 32), torch.arange(LENGTH)[None]
        blocks = indexer(hidden, (angles.cos(), angles.sin()), None, places)
    (score,) = scores
    return score.reshape(-1, LENGTH), blocks.reshape(-1, TOPK).to(torch.int32)


def in_order(blocks):
    """Sort the blocks of each query; -1, which stands for none, stays at the end."""
    beyond = torch.where(blocks < 0, LENGTH, blocks).sort(dim=1).values
    return torch.where(beyond == LENGTH, -1, beyond)


def test_blocks_are_those_of_transformers(indexed):
    score, blocks = indexed
    lengths = np.tile(np.arange(LENGTH) + 1, 2)
    options = {"lengths": lengths, "topk": TOPK, "block_size": BLOCK, "local_blocks": 2}
    selected = cpattn.sparse.select_blocks(score, **options)
    assert torch.equal(selected.blocks, in_order(blocks))

    placement = TokenInterleave(shard_size=2, interleave=BLOCK)
    parts = []
    for rank in range(2):
        own, _ = placement.filter_local(np.arange(LENGTH), rank)
        parts.append(
            cpattn.sparse.select_blocks(score[:, own], dcp_rank=rank, dcp_size=2, **options)
        )
    gathered = [torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)]
    merged = cpattn.sparse.merge_blocks(*gathered, TOPK)
    assert torch.equal(merged.blocks, selected.blocks)
    assert torch.equal(merged.block_scores, selected.block_scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 0}, r"topk must be in \[1, 268435456\], got 0"),
        ({"init_blocks": 3}, "init_blocks must be in .*, topk 2, got 3"),
        ({"init_blocks": 2}, "must be at most topk together, 2, got 2 and 1"),
        ({"dcp_size": 0}, r"dcp_size must be in \[1, 2147483647\], got 0"),
        ({"dcp_rank": 1}, r"dcp_rank must be in \[0, 1\), got 1"),
        ({"block_size": 0}, r"block_size must be in \[1, 2147483647\], got 0"),
        ({"lengths": [8, 9]}, "score has, 8 columns, got 9, of which the rank has 9, at index 1"),
        ({"lengths": [8, -1]}, r"lengths must be in \[0, 2147483647\], got -1 at index 1"),
        ({"lengths": [8]}, "one element per row of score, 2, got 1"),
        ({"score": np.zeros((2, 8))}, "score must be float32, got float64"),
    ],
)
def test_what_is_refused(options, message):
    good = {"score": np.zeros((2, 8), np.float32), "lengths": [8, 8], "topk": 2, "block_size": 4}
    with pytest.raises(ValueError, match=f"^select_blocks: .*{message}"):
        cpattn.sparse.select_blocks(**good | options)


def test_what_is_not_merged():
    blocks, scores = np.zeros((1, 4), np.int32), np.zeros((1, 3), np.float32)
    message = r"^merge_blocks: block_scores must have shape \[1, 4\], got \[1, 3\]"
    with pytest.raises(ValueError, match=message):
        cpattn.sparse.merge_blocks(blocks, scores, 2)
