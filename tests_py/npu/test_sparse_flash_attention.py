# SPDX-License-Identifier: Apache-2.0
"""npu_sparse_flash_attention against the oracle, in all its layouts and modes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import zeros

from cpattn.npu import npu_sparse_flash_attention as operator
from support.npu.sparse_flash_cases import HEADS, Batch, Case, assert_query

CASES = [
    *(Case(), Case(mode=0), Case(block=4), Case(block=7, mode=0)),
    *(Case(layout_kv="TND"), Case(layout_query="BSND")),
    Case("BSND", "BSND", block=3),
    Case("BSND", "BSND", q_lens=(5, 5), kv_lens=(30, 30), rope_dim=0),
    Case(q_lens=(9,), kv_lens=(4,)),  # the first queries stand before all keys
    Case(q_lens=(2, 2), kv_lens=(600, 550), head_dim=512, v_head_dim=512, rope_dim=64),
]


@functools.cache
def arguments_and_expected(index, dtype):
    """Made once for all instruction sets."""
    batch = Batch(CASES[index], getattr(torch, dtype))
    return batch.arguments(), list(batch.expected())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_against_the_oracle(isa, index, dtype):
    arguments, expected = arguments_and_expected(index, dtype)
    out, softmax_max, softmax_sum = operator(**arguments)
    out = out if out.dim() == 4 else out[None]
    for (b, i), attended, largest in expected:
        found = (x[b, ..., i, :] for x in (softmax_max, softmax_sum))
        assert_query(out[b, i], *found, attended, largest)


def test_rows_past_their_sequence_are_zeros():
    """Padding of a batch, which is NaN here, and packed rows after the last sequence."""
    batch = Batch(Case(layout_query="BSND"), torch.float32)
    out, softmax_max, softmax_sum = operator(**batch.arguments())
    assert out.shape == (3, 5, HEADS, 48)
    assert softmax_max.shape == softmax_sum.shape == (3, 1, 5, HEADS)
    for b, q_len in enumerate(batch.case.q_lens):
        assert torch.all(out[b, q_len:] == 0)
        assert torch.all(torch.isneginf(softmax_max[b, 0, q_len:]))
        assert torch.all(softmax_sum[b, 0, q_len:] == 0)

    batch = Batch(Case(), torch.float32)
    whole = operator(**batch.arguments())
    short = batch.arguments(actual_seq_lengths_query=[3, 3, 6], block_table=batch.tables)
    out, softmax_max, _ = operator(**short)
    assert torch.equal(out[:3], whole[0][:3])
    assert torch.all(out[6] == 0)
    assert torch.all(torch.isneginf(softmax_max[0, 6]))


def test_lengths_default_to_the_whole_batch():
    case = Case(layout_query="BSND", layout_kv="BSND", q_lens=(4, 4), kv_lens=(9, 9))
    arguments = Batch(case, torch.float32).arguments()
    for name in ("query", "query_rope", "key", "key_rope", "value", "sparse_indices"):
        arguments[name] = arguments[name][:, :-1].contiguous()
    expected = operator(**arguments)
    del arguments["actual_seq_lengths_query"], arguments["actual_seq_lengths_kv"]
    for x, y in zip(operator(**arguments), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("size", [2**20, 2**62, 2**63 - 1])
def test_a_block_longer_than_the_sequence(size):
    """Is the sequence: block 0 names all keys, and there is no other."""
    kv = torch.randn(1, 5, 1, 32)
    arguments = {"layout_query": "BSND", "layout_kv": "BSND", "sparse_mode": 0}
    query, indices = torch.randn(1, 2, 3, 32), torch.tensor([[[[0, 3]], [[3, 1]]]])
    out, *_ = operator(query, kv, kv, indices, 0.2, sparse_block_size=size, **arguments)
    every = torch.arange(5).expand(1, 2, 1, 5)
    expected, *_ = operator(query, kv, kv, every, 0.2, **arguments)
    assert torch.equal(out[0, 0], expected[0, 0])
    assert torch.all(out[0, 1] == 0)


def test_no_heads_and_without_softmax_results_in_numpy():
    query, kv = zeros(1, 2, 0, 32), zeros(1, 5, 1, 32)
    out, *_ = operator(query, kv, kv, zeros(1, 2, 1, 4).int(), 1.0)
    assert out.shape == (1, 2, 0, 32)
    arguments = Batch(Case(), torch.float32).arguments(return_softmax_lse=False)
    expected, *_ = operator(**arguments)
    tensors = {name: x.numpy() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    out, softmax_max, softmax_sum = operator(**arguments | tensors)
    assert isinstance(out, np.ndarray)
    assert softmax_max.shape == softmax_sum.shape == (0,)
    np.testing.assert_array_equal(out, expected.numpy())


REFUSED = [
    ({"layout_query": "BNSD"}, "layout_query must be 'BSND' or 'TND', got 'BNSD'"),
    ({"layout_kv": "BSND"}, "layout_kv must be layout_query or 'PA_BSND', got 'BSND'"),
    ({"block_table": None}, "block_table must be given with layout_kv 'PA_BSND'"),
    ({"sparse_mode": 4}, "sparse_mode must be 0 or 3, got 4"),
    ({"pre_tokens": 5}, "pre_tokens and next_tokens must be .* got 5"),
    ({"sparse_block_size": 0}, "sparse_block_size must be >= 1, got 0"),
    ({"attention_mode": 1}, "attention_mode must be 0 or 2, got 1"),
    ({"attention_mode": 0}, "must be given with attention_mode 2 and only"),
    ({"query_rope": None}, "query_rope and key_rope must be given with attention_mode"),
    ({"scale_value": -1.0}, "scale_value must be a positive number, got -1"),
    ({"actual_seq_lengths_query": None}, "actual_seq_lengths_query is mandatory for TND"),
    ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is mandatory with block_table"),
    ({"actual_seq_lengths_query": [3, 2, 7]}, "actual_seq_lengths_query must be prefix sums, .* g"),
    ({"actual_seq_lengths_query": [3, 3, 8]}, "packed tokens, 7, got 8 at index 2"),
    ({"actual_seq_lengths_kv": [1, 2]}, r"one entry per sequence \(3\), got 2"),
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


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda x: str(x)[:50])
def test_what_is_refused(changes, message):
    arguments = Batch(Case(), torch.float32).arguments() | changes
    with pytest.raises(ValueError, match="npu_sparse_flash_attention: .*" + message):
        operator(**arguments)


def test_a_block_table_may_be_broadcast_over_any_number_of_columns():
    ones = np.ones((1, 16, 1, 16), np.float32)
    options = {"layout_query": "BSND", "layout_kv": "PA_BSND", "attention_mode": 0}
    options["block_table"] = np.broadcast_to(np.int32(0), (1, 2**60))
    indices = np.zeros((1, 1, 1, 2), np.int32)
    tensors = ones[:, :1], ones, ones, indices
    out, *_ = operator(*tensors, 0.5, actual_seq_lengths_kv=[20], **options)
    np.testing.assert_array_equal(out, np.ones((1, 1, 1, 16), np.float32))
