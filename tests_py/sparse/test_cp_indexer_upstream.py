# SPDX-License-Identifier: Apache-2.0
"""Mistakes of engines in the indexer under context parallelism, each next to the right way.

The old behaviours live here only, behind arguments of `upstream`.
"""

from __future__ import annotations

import pytest
import torch

import cpattn
from support.sparse.indexer_batch import IndexerBatch


def upstream(batch, metadata, q, weights, *, add_prefix=True, midpoint=True, all_requests=True):
    """sglang's two operator calls, for the prev half of the rows and for the next.

    Before 0.5.23 it split at (rows + 1) // 2 (`midpoint`); before its pull request 23268 it left
    out the prefix (not `add_prefix`); on CUDA it used request 0 for all rows (not
    `all_requests`).
    """
    bs = metadata.bs if all_requests else 1
    split = (len(q) + 1) // 2 if midpoint else metadata.total_q_prev_tokens
    halves = [
        (slice(split), metadata.actual_seq_q_prev_list, metadata.kv_len_prev_list),
        (slice(split, None), metadata.actual_seq_q_next_list, metadata.kv_len_next_list),
    ]
    found = []
    for rows, q_lens, kv_lens in halves:
        kv_lens = [
            kv_len + (prefix if add_prefix else 0)
            for kv_len, prefix in zip(kv_lens[:bs], batch.prefix_lens, strict=False)
        ]
        sums, total = [], 0
        for q_len in q_lens[:bs]:
            total += q_len
            sums.append(total)
        if not all_requests:  # row i sees kv_len - q_len + 1 + i keys, whatever its request
            kv_lens[0] += len(q[rows]) - sums[0]
            sums = [len(q[rows])]
        indices, _ = cpattn.npu.npu_lightning_indexer(
            q[rows],
            batch.cache[:, :, None],
            weights[rows],
            actual_seq_lengths_query=sums,
            actual_seq_lengths_key=kv_lens,
            block_table=batch.block_tables[:bs],
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=batch.topk,
        )
        found.append(indices[:, 0])
    return torch.cat(found)


def bare_batch(extend_lens, prefix_lens, cp_size=2):
    return IndexerBatch(extend_lens, prefix_lens, cp_size, convention="bare")


def test_prefix_forgotten():
    """Pull request 23268 gave every rank wrong keys, by bare lengths and a cached prefix."""
    batch = bare_batch((13,), (40,))
    for metadata in batch.metadata:
        q, weights = batch.shard(metadata)
        ours = batch.run(metadata, q, weights, prefix_lens=[40])
        assert torch.equal(upstream(batch, metadata, q, weights), ours)
        forgotten = upstream(batch, metadata, q, weights, add_prefix=False)
        assert torch.all(torch.any(forgotten != ours, dim=1))


def test_prefix_counted_twice():
    """Baked lengths with the same addition show keys that a token must not see."""
    batch = IndexerBatch((13,), (4,), 2)
    batch.block_tables = batch.block_tables[:, [0, 1, 1]]  # so that they are there
    metadata = batch.metadata[0]
    q, weights = batch.shard(metadata)
    twice = upstream(batch, metadata, q, weights)
    assert not torch.equal(twice, batch.run(metadata, q, weights))


def test_halves_of_a_batch_of_one_only():
    """Rows are 4 prev and 2 next, and the middle is 3: the fourth is asked in the wrong half."""
    batch = bare_batch((5, 5), (0, 30))
    metadata = batch.metadata[0]
    q, weights = batch.shard(metadata)
    ours = batch.run(metadata, q, weights, prefix_lens=[0, 30])
    assert (metadata.total_q_prev_tokens, metadata.total_q_next_tokens) == (4, 2)
    assert torch.equal(upstream(batch, metadata, q, weights, midpoint=False), ours)
    with pytest.raises(ValueError, match=r"at most the number of packed .*, 3, got 4"):
        upstream(batch, metadata, q, weights)  # an NPU would read past the half


def test_halves_of_padded_rows():
    """A batch of one is wrong, too: 3 + 2 rows padded to 8 are cut after the fourth."""
    batch = bare_batch((9,), (30,))
    metadata = batch.metadata[0]
    q, weights = batch.shard(metadata, pad_rows=3)
    ours = batch.run(metadata, q, weights, prefix_lens=[30])
    halves = upstream(batch, metadata, q, weights)
    assert torch.equal(halves[:3], ours[:3])
    assert torch.all(halves[3] == -1)


def test_lengths_of_request_zero_only():
    """All rows looked at the keys of the first request."""
    single, two = bare_batch((13,), (40,)), bare_batch((13, 11), (40, 30))
    for batch, wrong in ((single, False), (two, True)):
        metadata = batch.metadata[0]
        q, weights = batch.shard(metadata)
        ours = batch.run(metadata, q, weights, prefix_lens=batch.prefix_lens)
        zero = upstream(batch, metadata, q, weights, all_requests=False)
        assert torch.equal(zero, ours) is not wrong
