# SPDX-License-Identifier: Apache-2.0
"""npu_lightning_indexer and npu_sparse_flash_attention work in all layouts and modes."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch import zeros

from cpattn.npu import npu_lightning_indexer
from cpattn.npu import npu_sparse_flash_attention as sparse_attention
from support.cases import strided_copy
from support.npu.sparse_cases import DIM, FORMS, HEADS, Batch, Case, Operator, assert_query
from support.sparse.indexer_batch import integers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(form, dtype):
    operator = Operator(form, dtype=dtype)
    for mode, values in itertools.product((0, 3), (False, True)):
        result = npu_lightning_indexer(**operator.arguments(sparse_mode=mode, return_value=values))
        operator.check(result, mode, values)


def test_defaults():
    """Lengths default to the tensors'; other defaults are the operator's."""
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
    """Heads and blocks may have gaps; tokens of a batch have a constant stride."""
    operator = Operator(form)
    arguments = operator.arguments()
    query = arguments["query"]
    wide = torch.full((*query.shape[:-1], DIM + 8), torch.nan)[..., 4 : DIM + 4]
    key = strided_copy(arguments["key"])
    operator.check(npu_lightning_indexer(**arguments | {"query": wide.copy_(query), "key": key}))


def test_sequences_that_share_blocks():
    """Sequences share a cached prefix or whole tables, and lengths shrink."""
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


ROWS, PACKED, BLOCKS, PACKED_BLOCKS = FORMS


NOTHING = [((2, 1), (0, 0), torch.Tensor.clone), ((0, 0), (0, 0), torch.Tensor.numpy)]
NOTHING += [((0,), (5,), torch.Tensor.numpy)]


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize(("q_lens", "k_lens", "container"), NOTHING)
def test_no_keys_or_no_queries(form, q_lens, k_lens, container):
    operator = Operator(form, q_lens, k_lens)
    arguments = operator.arguments()
    if form[1] != "PA_BSND":  # there is no room for keys, either
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


CASES = [
    *(Case(), Case(mode=0), Case(block=4), Case(block=7, mode=0)),
    *(Case(layout_kv="TND"), Case(layout_query="BSND")),
    Case("BSND", "BSND", block=3),
    Case("BSND", "BSND", q_lens=(5, 5), kv_lens=(30, 30), rope_dim=0),
    Case(q_lens=(9,), kv_lens=(4,)),  # the first queries are before all keys
    Case(q_lens=(2, 2), kv_lens=(600, 550), head_dim=512, v_head_dim=512, rope_dim=64),
]


@functools.cache
def arguments_and_expected(index, dtype):
    """Make arguments and results once for all instruction sets."""
    batch = Batch(CASES[index], getattr(torch, dtype))
    return batch.arguments(), list(batch.expected())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_against_the_oracle(isa, index, dtype):
    arguments, expected = arguments_and_expected(index, dtype)
    out, softmax_max, softmax_sum = sparse_attention(**arguments)
    out = out if out.dim() == 4 else out[None]
    for (b, i), attended, largest in expected:
        found = (x[b, ..., i, :] for x in (softmax_max, softmax_sum))
        assert_query(out[b, i], *found, attended, largest)


def test_rows_past_their_sequence_are_zeros():
    """Padding of a batch, which is NaN here, and packed rows after the last sequence are zeros."""
    batch = Batch(Case(layout_query="BSND"), torch.float32)
    out, softmax_max, softmax_sum = sparse_attention(**batch.arguments())
    assert out.shape == (3, 5, HEADS, 48)
    assert softmax_max.shape == softmax_sum.shape == (3, 1, 5, HEADS)
    for b, q_len in enumerate(batch.case.q_lens):
        assert torch.all(out[b, q_len:] == 0)
        assert torch.all(torch.isneginf(softmax_max[b, 0, q_len:]))
        assert torch.all(softmax_sum[b, 0, q_len:] == 0)

    batch = Batch(Case(), torch.float32)
    whole = sparse_attention(**batch.arguments())
    short = batch.arguments(actual_seq_lengths_query=[3, 3, 6], block_table=batch.tables)
    out, softmax_max, _ = sparse_attention(**short)
    assert torch.equal(out[:3], whole[0][:3])
    assert torch.all(out[6] == 0)
    assert torch.all(torch.isneginf(softmax_max[0, 6]))


def test_lengths_default_to_the_whole_batch():
    case = Case(layout_query="BSND", layout_kv="BSND", q_lens=(4, 4), kv_lens=(9, 9))
    arguments = Batch(case, torch.float32).arguments()
    for name in ("query", "query_rope", "key", "key_rope", "value", "sparse_indices"):
        arguments[name] = arguments[name][:, :-1].contiguous()
    expected = sparse_attention(**arguments)
    del arguments["actual_seq_lengths_query"], arguments["actual_seq_lengths_kv"]
    for x, y in zip(sparse_attention(**arguments), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("size", [2**20, 2**62, 2**63 - 1])
def test_a_block_longer_than_the_sequence(size):
    """Such a block is the whole sequence: block 0 names all keys, and no other block exists."""
    kv = torch.randn(1, 5, 1, 32)
    arguments = {"layout_query": "BSND", "layout_kv": "BSND", "sparse_mode": 0}
    query, indices = torch.randn(1, 2, 3, 32), torch.tensor([[[[0, 3]], [[3, 1]]]])
    out, *_ = sparse_attention(query, kv, kv, indices, 0.2, sparse_block_size=size, **arguments)
    every = torch.arange(5).expand(1, 2, 1, 5)
    expected, *_ = sparse_attention(query, kv, kv, every, 0.2, **arguments)
    assert torch.equal(out[0, 0], expected[0, 0])
    assert torch.all(out[0, 1] == 0)


def test_no_heads_and_without_softmax_results():
    query, kv = zeros(1, 2, 0, 32), zeros(1, 5, 1, 32)
    out, *_ = sparse_attention(query, kv, kv, zeros(1, 2, 1, 4).int(), 1.0)
    assert out.shape == (1, 2, 0, 32)
    batch = Batch(Case(), torch.float32)
    out, softmax_max, softmax_sum = sparse_attention(**batch.arguments(return_softmax_lse=False))
    assert torch.equal(out, sparse_attention(**batch.arguments())[0])
    assert softmax_max.shape == softmax_sum.shape == (0,)


SPARSE_REFUSED = [
    ({"layout_query": "BNSD"}, "layout_query must be 'BSND' or 'TND', got 'BNSD'"),
    ({"sparse_mode": 4}, "sparse_mode must be 0 or 3, got 4"),
    ({"sparse_block_size": 0}, "sparse_block_size must be >= 1, got 0"),
    ({"attention_mode": 1}, "attention_mode must be 0 or 2, got 1"),
    ({"attention_mode": 0}, "must be given with attention_mode 2 and only"),
    ({"query_rope": None}, "query_rope and key_rope must be given with attention_mode"),
    ({"scale_value": -1.0}, "scale_value must be a positive number, got -1"),
    ({"actual_seq_lengths_query": None}, "actual_seq_lengths_query is mandatory for TND"),
    ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is mandatory with block_table"),
    ({"actual_seq_lengths_kv": [1, 2, 99]}, r"actual_seq_lengths_kv must be in \[0, 48\], got 99 "),
    ({"block_table": np.full((3, 6), 70)}, r"page ids must be in \[0, 11\), got 70"),
    ({"query": zeros(7, 32)}, "query must have 3 dimensions"),
    ({"query": zeros(7, HEADS, 32).double()}, "query must be float32, float16"),
    ({"query": zeros(7, HEADS, 577)}, r"D of query must be in \[1, 576\], got 577"),
    ({"key": zeros(11, 8, 1, 64)}, "key must have shape .* got .*64"),
    ({"key": zeros(11, 8, 2, 32)}, "key must have shape .*page_size, 1, 32"),
    ({"value": zeros(9, 8, 1, 48)}, "value must have the tokens of key"),
    ({"value": zeros(11, 8, 1, 48).half()}, "value must be float32, got"),
    ({"value": torch.tensor(1.0)}, "value must have 4 dimensions"),
    ({"query_rope": zeros(6, HEADS, 16)}, "query_rope must have the tokens"),
    ({"sparse_indices": zeros(6, 1, 4).int()}, "sparse_indices must have the"),
    ({"sparse_indices": zeros(7, 2, 4).int()}, "and 1 heads, got"),
    ({"sparse_indices": zeros(7, 1, 4)}, "sparse_indices must be int32 or"),
]


@pytest.mark.parametrize(("changes", "message"), SPARSE_REFUSED, ids=lambda x: str(x)[:50])
def test_what_sparse_attention_refuses(changes, message):
    arguments = Batch(Case(), torch.float32).arguments() | changes
    with pytest.raises(ValueError, match="npu_sparse_flash_attention: .*" + message):
        sparse_attention(**arguments)


def test_a_block_table_may_be_broadcast_over_any_number_of_columns():
    ones = np.ones((1, 16, 2, 16), np.float32)
    options = {"layout_query": "BSND", "layout_key": "PA_BSND", "sparse_count": 20}
    options["block_table"] = np.broadcast_to(np.int32(0), (1, 2**60))
    tensors = ones[:, :1], ones[:, :, :1], np.ones((1, 1, 2), np.float32)
    indices, _ = npu_lightning_indexer(*tensors, actual_seq_lengths_key=[20], **options)
    np.testing.assert_array_equal(np.ravel(indices), np.arange(20))


def test_a_broadcast_block_table_of_sparse_attention():
    ones = np.ones((1, 16, 1, 16), np.float32)
    options = {"layout_query": "BSND", "layout_kv": "PA_BSND", "attention_mode": 0}
    options["block_table"] = np.broadcast_to(np.int32(0), (1, 2**60))
    indices = np.zeros((1, 1, 1, 2), np.int32)
    tensors = ones[:, :1], ones, ones, indices
    out, *_ = sparse_attention(*tensors, 0.5, actual_seq_lengths_kv=[20], **options)
    np.testing.assert_array_equal(out, np.ones((1, 1, 1, 16), np.float32))
