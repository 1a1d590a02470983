# SPDX-License-Identifier: Apache-2.0
"""cp_indexer_topk gives ranks the rows of the whole batch, from caches of every form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from support.cp_batches import STRATEGIES
from support.examples import examples
from support.pairwise import pairwise
from support.sparse.indexer_batch import KEY_DTYPES, PACKED_FORMS, ROW_FORMS, IndexerBatch


@pytest.mark.parametrize(
    ("form", "scaled", "dtype", "page_size"),
    pairwise(ROW_FORMS, (False, True), KEY_DTYPES, (1, 16, 64)),
)
def test_forms_of_rows(form, scaled, dtype, page_size):
    IndexerBatch(
        (6, 3), (20, 0), 2, form=form, dtype=dtype, scaled=scaled, page_size=page_size
    ).check()


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("form", PACKED_FORMS)
def test_packed_forms(form, page_size, dim):
    """A token has 132 bytes at dimension 128; a page has all keys, then their scales."""
    batch = IndexerBatch(
        (6, 3), (20, 0), 2, form=form, dtype="uint8", scaled=True, page_size=page_size, dim=dim
    )
    assert batch.cache[0].numel() == page_size * (dim + 4)
    batch.check()


def test_strided_caches():
    """Pages and rows may have gaps, as layers of one pool have them."""
    batch = IndexerBatch((6, 3), (20, 0), 2, dtype="int8", scaled=True)
    rows = torch.full((batch.num_pages, 2, 20, 2, 32), 99, dtype=torch.int8)[:, 1, 2:18, 1]
    scales = torch.full((batch.num_pages, 3, 16, 2), torch.nan)[:, 1, :, 1]
    batch.cache, batch.k_scale = rows.copy_(batch.cache), scales.copy_(batch.k_scale)
    batch.check()
    batch = IndexerBatch((6, 3), (20, 0), 2, dtype="uint8", scaled=True)
    packed = torch.full((batch.num_pages, 3, batch.cache.shape[1]), 99, dtype=torch.uint8)[:, 1]
    batch.cache = packed.copy_(batch.cache)
    batch.check()


@pytest.mark.parametrize("shape", ["[T, H]", "[T, H, 1]"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights(shape, dtype):
    batch = IndexerBatch((6, 3), (20, 0), 2)
    metadata = batch.metadata[0]
    q, weights = batch.shard(metadata)
    weights = weights.to(dtype)[..., None] if shape.endswith("1]") else weights.to(dtype)
    out = batch.run(metadata, q, weights)
    np.testing.assert_array_equal(out, batch.expected()[metadata.local_q_indices])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_physical_padding(strategy):
    batch = IndexerBatch((9, 5), (4, 0), 4, strategy)
    for metadata in batch.metadata:
        padded = metadata.pad_to_physical()
        rows = len(metadata.local_q_indices)
        q, weights = batch.shard(metadata, padded.per_rank_actual_token[0] - rows)
        out = batch.run(padded, q, weights)
        assert torch.equal(out[:rows], batch.run(metadata))
        assert torch.all(out[rows:] == -1)


def test_unsorted_rows_are_by_index():
    batch = IndexerBatch((12, 7), (20, 0), 2)
    for metadata in batch.metadata:
        by_score = batch.run(metadata)
        by_index = batch.run(metadata, sorted=False)
        assert not torch.equal(by_score, by_index)
        for one, other in zip(by_score.tolist(), by_index.tolist(), strict=True):
            chosen = sorted(i for i in one if i >= 0)
            assert other == chosen + [-1] * (batch.topk - len(chosen))


@settings(max_examples=examples(60), deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=4),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    strategy=st.sampled_from(STRATEGIES),
    convention=st.sampled_from(["baked", "bare"]),
    page_size=st.sampled_from([1, 16, 64]),
    topk=st.integers(1, 40),
    pad_rows=st.integers(0, 2),
)
def test_ragged_batches(lens, cp_size, strategy, convention, page_size, topk, pad_rows):
    extend_lens, prefix_lens = zip(*lens, strict=True)
    IndexerBatch(
        extend_lens, prefix_lens, cp_size, strategy, convention, page_size=page_size, topk=topk
    ).check(pad_rows=pad_rows, prefix_lens=prefix_lens if convention == "bare" else None)


def test_prefix_lens_are_for_bare_metadata_and_all_of_it():
    batches = {c: IndexerBatch((10, 14), (5, 30), 2, "zigzag", c) for c in ("baked", "bare")}
    baked, bare = (batch.metadata[1] for batch in batches.values())
    with pytest.raises(ValueError, match="'baked', whose kv lengths count the prefix already"):
        batches["baked"].run(baked, prefix_lens=[5, 30])
    with pytest.raises(ValueError, match="'bare' and a cached prefix, got prefix 5 of sequence 0"):
        batches["bare"].run(bare)
    with pytest.raises(ValueError, match="got 31 for sequence 1, whose prefix is 30"):
        batches["bare"].run(bare, prefix_lens=[5, 31])
    with pytest.raises(ValueError, match=r"must have one entry per sequence \(2\), got 1"):
        batches["bare"].run(bare, prefix_lens=[5])


REFUSED = [
    ({"page_size": 0}, r"page_size must be in \[1, 2147483647\], got 0"),
    ({"page_size": 4 + 2**62}, r"page_size must be in \[1, 2147483647\]"),
    ({"page_size": 8}, r"index_k_cache must be .* with page_size 8, got shape \[\d+, 16, 32\]"),
    ({"topk": 0}, "topk must be 1 to 1048576, got 0"),
    ({"topk": -3}, "topk must be 1 to 1048576, got -3"),
    ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
    ({"block_tables": [[0]]}, r"block_tables must have one row per sequence \(2\), got 1"),
    ({"block_tables": [[0], [1]]}, r"block_tables must have .*columns for sequence 1 \(kv_len 26"),
    ({"block_tables": [[0, 1], [2, 99]]}, r"page ids must be in .*, got 99 at position 1"),
    ({"cache": torch.zeros(5, 16, 32, dtype=torch.float16)}, "index_k_cache .*uint8, got float16"),
    ({"cache": torch.zeros(5, 16, 48, dtype=torch.bfloat16)}, r"index_k_cache .*\[5, 16, 48\]"),
    ({"cache": torch.zeros(5, 16, 2, 32, dtype=torch.bfloat16)}, r"index_k_cache .*16, 2, 32\]"),
    ({"cache": torch.zeros(80, 32, dtype=torch.bfloat16)}, r"index_k_cache .*got shape \[80, 32\]"),
    ({"cache": torch.zeros(5, 16, 64, dtype=torch.bfloat16)[..., ::2]}, "index_k_cache .*stride 2"),
    ({"cache": torch.zeros(81, 1, 32, dtype=torch.bfloat16)}, "index_k_cache .*= 16 rows, got 81"),
    ({"cache": torch.zeros(5, 16 * 37, dtype=torch.uint8)}, r"index_k_cache of .*shape \[5, 592\]"),
    ({"cache": torch.zeros(576, dtype=torch.uint8)}, r"index_k_cache of uint8 .*got shape \[576\]"),
    ({"cache": torch.zeros(5, 16, 40, dtype=torch.uint8)[..., :36]}, "index_k_cache .*576 bytes"),
    ({"cache": torch.zeros(5, 578, dtype=torch.uint8)[:, :576]}, "scales at .*578 bytes apart"),
    ({"cache": torch.zeros(5, 580, dtype=torch.uint8)[:, 1:577]}, "index_k_cache .*of 4 bytes"),
    (
        {"cache": torch.zeros(5, 576, dtype=torch.uint8), "k_scale": torch.ones(5, 16)},
        "k_scale must not be given with index_k_cache of uint8, which has it",
    ),
    ({"k_scale": torch.ones(3, 16, 1)}, "k_scale must be float32"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: str(x)[:50])
def test_value_errors(change, message):
    batch = IndexerBatch((10, 14), (5, 12))
    with pytest.raises(ValueError, match=message) as error:
        batch.run(batch.metadata[0], **change)
    assert str(error.value).startswith("cp_indexer_topk: ")


def test_queries_that_do_not_fit():
    batch = IndexerBatch((10, 14), (5, 0), 2)
    metadata = batch.metadata[0]
    q, weights = batch.shard(metadata)
    with pytest.raises(ValueError, match=r"q must have at least the 12 rows .* rank 0, got 11"):
        batch.run(metadata, q[:-1], weights[:-1])
    with pytest.raises(ValueError, match="q must have 3 dimensions"):
        batch.run(metadata, q[0], weights)
    with pytest.raises(ValueError, match="weights must"):
        batch.run(metadata, q, weights[:, :2])


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave_size", [1, 4, 16])
def test_owners_of_global_indices(dcp_size, interleave_size):
    """Together the ranks have every index once; each has them in order and without holes."""
    batch = IndexerBatch((10, 14), (40, 0), topk=12)
    indices = batch.run(batch.metadata[0])
    found = [[] for _ in indices]
    for rank in range(dcp_size):
        local = cpattn.sparse.dcp_local_indices(
            indices, dcp_rank=rank, dcp_size=dcp_size, interleave_size=interleave_size
        )
        assert local.dtype == torch.int32
        for row, values in enumerate(local.tolist()):
            owned = [v for v in values if v >= 0]
            assert values[len(owned) :] == [-1] * (12 - len(owned))
            back = [
                (v // interleave_size * dcp_size + rank) * interleave_size + v % interleave_size
                for v in owned
            ]
            assert back == [i for i in indices[row].tolist() if i in back]
            found[row] += back
    for row, values in enumerate(found):
        assert sorted(values) == sorted(i for i in indices[row].tolist() if i >= 0)


@pytest.mark.parametrize(
    ("rank", "size", "interleave", "message"),
    [
        (0, 0, 1, "dcp_size must be >= 1, got 0"),
        (2, 2, 1, r"dcp_rank must be in \[0, 2\), got 2"),
        (-1, 2, 1, r"dcp_rank must be in \[0, 2\), got -1"),
        (0, 2, 0, "interleave_size must be >= 1, got 0"),
        (0, 1 << 31, 1, "dcp_size must fit into int32"),
        (0, 1, 1 << 31, "interleave_size must fit into int3"),
    ],
)
def test_owner_errors(rank, size, interleave, message):
    indices, sizes = torch.zeros(2, 3, dtype=torch.int32), {"dcp_rank": rank, "dcp_size": size}
    with pytest.raises(ValueError, match=f"dcp_local_indices: {message}"):
        cpattn.sparse.dcp_local_indices(indices, **sizes, interleave_size=interleave)
