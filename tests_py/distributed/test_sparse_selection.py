# SPDX-License-Identifier: Apache-2.0
"""Candidates of ranks, merged: the selection of one pool, whatever the scores and placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from cpattn.distributed.plans.key_shares import KeyShares
from cpattn.distributed.sparse.inputs import SparseInputs
from cpattn.distributed.sparse.selection import (
    LocalIndex,
    all_positions,
    best_positions,
    candidate_width,
    rows_of_rank,
)
from support.distributed.sharded_worker import PLACEMENTS, shard_of
from support.sparse.indexer_batch import top_of

DIM = 16
# Each is the score of a key: what float32 orders, what it does not, and many equal ones.
SCORES = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, 1.0, 2.0, -1.0, 3e38, -3e38, 1e-45]


@st.composite
def batches(draw):
    """Placement, block tables, lengths, the scores of all keys, and rows that see some of them."""
    size = draw(st.integers(1, 4))
    page = draw(st.sampled_from([2, 4, 8]))
    placement = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))](size, page)
    lens = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    counts = -(-lens // page)
    order = draw(st.permutations(range(int(counts.sum()) + 2)))
    tables = np.full((len(lens), int(counts.max())), -1, np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = order[: counts.sum()]
    scores = draw(
        st.lists(st.sampled_from(SCORES), min_size=len(order) * page, max_size=len(order) * page)
    )
    request = np.array(draw(st.lists(st.integers(0, len(lens) - 1), min_size=1, max_size=8)))
    visible = np.array([draw(st.integers(1, int(lens[s]))) for s in request])
    return placement, page, tables, lens, np.array(scores, np.float32), request, visible


def inputs_of(pool_scores, page, topk):
    """Queries and keys whose product is 1, so that the scale of a key is its score."""
    one = torch.eye(1, DIM)
    slots = len(pool_scores)
    return SparseInputs(
        one[None], torch.zeros(slots, 1, 32), one[None], one.expand(slots, 1, DIM),
        torch.ones(1, 1), torch.from_numpy(pool_scores)[:, None], page_size=page, topk=topk,
        sm_scale=1.0, d_v=16, attn_sink=None,
    )  # fmt: skip


@given(batches(), st.integers(1, 12))
def test_the_union_of_what_ranks_select_is_the_selection_of_one_pool(batch, topk):
    placement, page, tables, lens, scores, request, visible = batch
    keep = visible > topk
    request, visible = request[keep], visible[keep]
    if not len(request):
        return
    shares = KeyShares(placement, tables, lens, page)
    size = placement.shard_size
    width = candidate_width(shares, size, request, visible, topk)
    q, weights = torch.eye(1, DIM).expand(len(request), 1, DIM), torch.ones(len(request), 1)
    found = []
    for rank in range(size):
        shard = shard_of(placement, rank, torch.from_numpy(scores), page).numpy()
        index = LocalIndex(inputs_of(shard, page, topk), shares, rank)
        found.append(index.candidates(q, weights, request, visible, width))
    positions = best_positions(torch.cat(found, dim=1), topk)
    for row, (s, n) in enumerate(zip(request, visible, strict=True)):
        slots = tables[s, np.arange(n) // page] * page + np.arange(n) % page
        np.testing.assert_array_equal(positions[row], top_of(scores[slots], topk))


@given(batches(), st.integers(1, 12))
def test_every_selected_key_is_on_one_rank(batch, topk):
    placement, page, tables, lens, _, request, visible = batch
    shares = KeyShares(placement, tables, lens, page)
    positions = all_positions(visible, topk)
    expected = np.where(np.arange(topk) < visible[:, None], np.arange(topk), -1)
    np.testing.assert_array_equal(positions, expected)
    slots = tables[request[:, None], np.maximum(expected, 0) // page] * page + expected % page
    owner, local = placement.owner_of(slots.ravel()), placement.local_index(slots.ravel())
    for rank in range(placement.shard_size):
        mine = (owner.reshape(slots.shape) == rank) & (expected >= 0)
        np.testing.assert_array_equal(
            rows_of_rank(shares, rank, request, positions),
            np.where(mine, local.reshape(slots.shape), -1),
        )
