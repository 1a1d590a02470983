# SPDX-License-Identifier: Apache-2.0
"""npu_lightning_indexer: layouts, modes, lengths and values against float64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import zeros

from cpattn.npu import npu_lightning_indexer
from support.cases import strided_copy
from support.npu.lightning_cases import DIM, FORMS, HEADS, Operator
from support.sparse.indexer_batch import IndexerBatch, integers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(form, dtype):
    operator = Operator(form, dtype=dtype)
    for mode, values in itertools.product((0, 3), (False, True)):
        result = npu_lightning_indexer(**operator.arguments(sparse_mode=mode, return_value=values))
        operator.check(result, mode, values)


@pytest.mark.parametrize("form", FORMS)
def test_every_instruction_set(isa, form):
    operator = Operator(form, (40, 3), (70, 33), torch.bfloat16)
    operator.check(npu_lightning_indexer(**operator.arguments(return_value=True)), values=True)


def test_defaults():
    """Lengths are those of the tensors; all else is as the operator has it."""
    operator = Operator(("BSND", "BSND"), (4, 4), (11, 11))
    arguments = operator.arguments(actual_seq_lengths_query=None, actual_seq_lengths_key=None)
    for name in ("query", "key", "weights"):
        arguments[name] = arguments[name][:, :-2].contiguous()
    indices, _ = npu_lightning_indexer(**arguments)
    assert torch.equal(indices, operator.expected(3)[0][:, :-2])
    query, key, weights = torch.ones(1, 3, 2, 32), torch.ones(1, 5, 1, 32), torch.ones(1, 3, 2)
    indices, values = npu_lightning_indexer(query, key, weights)
    assert indices.shape == (1, 3, 1, 2048)
    assert indices[0, :, 0, :5].tolist() == [[0, 1, 2, -1, -1], [0, 1, 2, 3, -1], [0, 1, 2, 3, 4]]
    assert torch.all(indices[..., 5:] == -1)
    assert values.shape == (0,)


@pytest.mark.parametrize("form", FORMS)
def test_strided_tensors(form):
    """Gaps between heads and blocks; the tokens of a batch stay one stride apart."""
    operator = Operator(form)
    arguments = operator.arguments()
    query = arguments["query"]
    wide = torch.full((*query.shape[:-1], DIM + 8), torch.nan)[..., 4 : DIM + 4]
    key = strided_copy(arguments["key"])
    operator.check(npu_lightning_indexer(**arguments | {"query": wide.copy_(query), "key": key}))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])
def test_numpy_in_numpy_out(dtype):
    operator = Operator(("TND", "PA_BSND"))
    arguments = operator.arguments(return_value=True)
    for name in ("query", "key"):
        arguments[name] = arguments[name].numpy().astype(dtype)
    arguments["weights"] = arguments["weights"].numpy()
    indices, values = npu_lightning_indexer(**arguments)
    expected, scores = operator.expected(3)
    assert isinstance(indices, np.ndarray)
    np.testing.assert_array_equal(indices, expected)
    assert values.dtype == dtype
    np.testing.assert_array_equal(values, scores.numpy().astype(dtype))


def test_sequences_that_share_blocks():
    """A cached prefix in common, whole tables in common, and lengths that shrink."""
    rng = np.random.default_rng(0)
    pool = torch.from_numpy(integers(rng, (5, 4, 1, DIM)))
    tables = [[0, 1, -1], [0, 1, -1], [0, 1, 2], [0, 3, -1], [0, -1, -1], [-1, -1, -1], [4, 1, 0]]
    k_lens = [5, 8, 9, 7, 4, 0, 12]
    query = torch.from_numpy(integers(rng, (2 * len(tables), HEADS, DIM)))
    weights = torch.from_numpy(integers(rng, (2 * len(tables), HEADS)))

    def run(rows, tables, k_lens):
        options = {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 3}
        options["actual_seq_lengths_query"] = np.arange(2, 2 * len(tables) + 1, 2)
        paged = {"block_table": tables, "actual_seq_lengths_key": k_lens, "return_value": True}
        return npu_lightning_indexer(query[rows], pool, weights[rows], **paged, **options)

    together = run(slice(None), tables, k_lens)
    alone = [
        run(slice(2 * b, 2 * b + 2), [table], [k_len])
        for b, (table, k_len) in enumerate(zip(tables, k_lens, strict=True))
    ]
    for result, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(result, torch.cat(parts))


@pytest.mark.parametrize(
    ("cp_size", "strategy"), [(1, "zigzag"), (2, "zigzag"), (3, "interleave"), (2, "contiguous")]
)
def test_one_row_per_token_is_cp_indexer_topk(cp_size, strategy):
    """As sglang 0.5.23 calls the operator: a sequence of one query for each local token, pad rows
    of one key."""
    batch = IndexerBatch((10, 4, 0, 17), (5, 0, 9, 30), cp_size, strategy)
    for metadata in batch.metadata:
        rows, pad_rows = len(metadata.local_q_indices), 2
        q, weights = batch.shard(metadata, pad_rows)
        requests = np.append(metadata.query_request_indices, [0] * pad_rows)
        q[rows:], weights[rows:] = 0, 0
        lengths = {
            "actual_seq_lengths_query": np.arange(1, rows + pad_rows + 1, dtype=np.int32),
            "actual_seq_lengths_key": np.append(metadata.query_cache_lengths, [1] * pad_rows),
        }
        paged = {"block_table": batch.block_tables[requests], "layout_key": "PA_BSND"}
        options = {"layout_query": "TND", "sparse_count": batch.topk}
        keys = batch.cache[:, :, None]
        indices, _ = npu_lightning_indexer(q, keys, weights, **lengths, **paged, **options)
        assert torch.equal(indices[:rows, 0], batch.run(metadata))
        assert indices[rows:, 0].tolist() == [[0] + [-1] * (batch.topk - 1)] * pad_rows


ROWS, PACKED, BLOCKS, PACKED_BLOCKS = FORMS


NOTHING = [((2, 1), (0, 0), torch.Tensor.clone), ((0, 0), (0, 0), torch.Tensor.numpy)]
NOTHING += [((0,), (5,), torch.Tensor.numpy)]


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize(("q_lens", "k_lens", "container"), NOTHING)
def test_no_keys_or_no_queries(form, q_lens, k_lens, container):
    operator = Operator(form, q_lens, k_lens)
    arguments = operator.arguments()
    if form[1] != "PA_BSND":  # nor room for them
        token_axis = 0 if form[1] == "TND" else 1
        arguments["key"] = arguments["key"].narrow(token_axis, 0, sum(k_lens))
    arguments |= {name: container(arguments[name]) for name in ("query", "key", "weights")}
    indices, values = npu_lightning_indexer(**arguments, return_value=True)
    assert (indices == -1).all()
    assert np.isneginf(np.asarray(values)).all()


HALF = {"query": zeros(15, 3, 32).half(), "key": zeros(51, 1, 32).half()}
REFUSED = [
    (ROWS, {"layout_query": "BNSD"}, "layout_query must be 'BSND' or 'TND', got 'BNSD'"),
    (ROWS, {"layout_key": "PA_BNSD"}, "layout_key must be layout_query or 'PA_BSND', got 'PA_BNSD"),
    (ROWS, {"layout_key": "TND"}, "layout_key must be layout_query or 'PA_BSND', got 'TND' with"),
    (ROWS, {"block_table": [[0]] * 4}, "block_table must be given with .* got layout_key 'BSND'"),
    (BLOCKS, {"block_table": None}, "block_table must be given with .* got layout_key 'PA_BSND'"),
    (ROWS, {"sparse_mode": 4}, "sparse_mode must be 0 or 3, got 4"),
    (ROWS, {"sparse_count": 0}, "sparse_count must be >= 1, got 0"),
    (ROWS, {"pre_tokens": 5}, r"pre_tokens and next_tokens must be 2\*\*63 - 1, got 5 and 92"),
    (ROWS, {"next_tokens": 0}, r"pre_tokens and next_tokens must be 2\*\*63 - 1, got .* and 0"),
    # Tensors.
    (PACKED, HALF, "query must be bfloat16 or float32, got float16"),
    (PACKED, {"key": zeros(51, 1, 32).bfloat16()}, "key must be float32 like query, got bfl"),
    (PACKED, {"query": zeros(15, 3, 1, 32)}, "query must have 3 dimensions"),
    (PACKED, {"key": zeros(51, 32)}, "key must have 3 dimensions"),
    (PACKED, {"key": zeros(51, 2, 32)}, r"key must have tokens with 1 head of the D of quer"),
    (PACKED, {"key": zeros(51, 1, 48)}, r"D of query, 32, got shape \[51, 1, 48\]"),
    (PACKED, {"key": zeros(0, 1, 32)}, "packed tokens, 0, got 20 at index 0"),
    (BLOCKS, {"key": zeros(7, 0, 1, 32)}, r"key must have blocks .* \[7, 0, 1, 32\]"),
    (PACKED, {"weights": zeros(15, 2)}, "weights must"),
    (PACKED, {"weights": zeros(15, 3, 1)}, "weights must have 2 dimensions"),
    (ROWS, {"query": zeros(4, 11, 3, 32)[:, :9]}, "query must have all its tokens one strid"),
    (ROWS, {"weights": zeros(4, 11, 3)[:, :9]}, "weights must have all its tokens one strid"),
    (ROWS, {"key": zeros(3, 22, 1, 32)}, "key must have the batch size of query, 4, got 3"),
    # Lengths.
    (ROWS, {"actual_seq_lengths_query": [5, 1, 0]}, r"must have one entry per sequence \(4\), got"),
    (ROWS, {"actual_seq_lengths_key": [20]}, r"must have one entry per sequence \(4\), got 1"),
    (ROWS, {"actual_seq_lengths_query": [5, 1, 0, 10]}, r"must be in \[0, 9\], got 10 at index 3"),
    (ROWS, {"actual_seq_lengths_key": [20, -1, 9, 3]}, r"must be in \[0, 22\], got -1 at index 1"),
    (PACKED, {"actual_seq_lengths_query": None}, "actual_seq_lengths_query is mandatory for TND"),
    (PACKED, {"actual_seq_lengths_key": None}, "actual_seq_lengths_key is mandatory for TND"),
    (BLOCKS, {"actual_seq_lengths_key": None}, "_key is mandatory with block_table"),
    (PACKED, {"actual_seq_lengths_query": [5, 4, 6, 13]}, "must be prefix sums, which never decre"),
    (PACKED, {"actual_seq_lengths_key": [20, 37, 46, 52]}, "at most the number of packed tokens, "),
    (PACKED, {"actual_seq_lengths_key": [20, 37, 46]}, r"one entry per sequence \(4\), got 3"),
    # Blocks.
    (BLOCKS, {"block_table": [[0, 1]]}, r"block_tables must have one row per sequence \(4\), got "),
    (BLOCKS, {"block_table": [[0]] * 4}, r"_key must be in \[0, 16\], got 20 at index 0"),
    (PACKED_BLOCKS, {"block_table": [[0, 7], [1, 2], [3], [4]]}, r"page ids must be in \[0, 7\), "),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSED, ids=lambda x: str(x)[:50])
def test_value_errors(form, change, message):
    with pytest.raises(ValueError, match=message) as error:
        npu_lightning_indexer(**Operator(form).arguments(**change))
    assert str(error.value).startswith("npu_lightning_indexer: ")


def test_type_errors():
    for change, message in (
        ({"query": [1.0]}, "npu_lightning_indexer: query must be a tensor"),
        ({"actual_seq_lengths_key": [1.5]}, "actual_seq_lengths_key must hold integers, got float"),
        ({"block_table": np.zeros((1, 1))}, "block_table must be int32 or int64, got float64"),
    ):
        with pytest.raises(TypeError, match=message):
            npu_lightning_indexer(**Operator(BLOCKS).arguments(**change))


def test_a_block_table_may_be_broadcast_over_any_number_of_columns():
    ones = np.ones((1, 16, 2, 16), np.float32)
    options = {"layout_query": "BSND", "layout_key": "PA_BSND", "sparse_count": 20}
    options["block_table"] = np.broadcast_to(np.int32(0), (1, 2**60))
    tensors = ones[:, :1], ones[:, :, :1], np.ones((1, 1, 2), np.float32)
    indices, _ = npu_lightning_indexer(*tensors, actual_seq_lengths_key=[20], **options)
    np.testing.assert_array_equal(np.ravel(indices), np.arange(20))
