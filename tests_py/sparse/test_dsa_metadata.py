# SPDX-License-Identifier: Apache-2.0
"""build_dsa_metadata agrees with a restatement in plain Python, and refuses bad arguments."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn import ForwardMode, build_cp_metadata
from cpattn.sparse import build_dsa_metadata
from support.sparse.topk_cases import PAGED, RAGGED

SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


def slots_of(bs, width, page_size):
    """Return req_to_token [bs, width], with pages in a random order."""
    pages = -(-width // page_size)
    first = np.random.default_rng(0).permutation(bs * pages).reshape(bs, pages) * page_size
    slots = first[:, :, None] + np.arange(page_size)
    return slots.reshape(bs, pages * page_size)[:, :width].astype(np.int32)


def restated(extend_lens, seq_lens, topk, ragged, table, page_size, cp=None):
    """Compute the fields of DsaMetadata token by token."""
    requests, lengths = [], []
    for s, (extend, seq) in enumerate(zip(extend_lens, seq_lens, strict=True)):
        requests += [s] * extend
        lengths += range(seq - extend + 1, seq + 1)
    bs_idx = list(range(len(seq_lens)))
    num_rows = len(requests)
    if cp is not None:
        requests = cp.shard(np.array(requests, int))[: len(cp.local_q_indices)].tolist()
        lengths = cp.shard(np.array(lengths, int))[: len(cp.local_q_indices)].tolist()
        bs_idx = sorted(set(requests))
        num_rows = cp.per_rank_actual_token[cp.cp_rank]
    rows_of = [requests.count(s) for s in bs_idx]
    keys_of = [seq_lens[s] for s in bs_idx]
    cu_seqlens_k = [sum(keys_of[:i]) for i in range(len(bs_idx) + 1)]
    begins = {s: cu_seqlens_k[i] for i, s in enumerate(bs_idx)}
    ks = [begins[s] for s in requests]
    seen = [min(max(length, 0), topk) for length in lengths]
    seen += [0] * (num_rows - len(seen))
    width = max(keys_of, default=0)
    page_table = [table[s][:width] for s in bs_idx]
    concatenated = [slot for s in bs_idx for slot in table[s][: seq_lens[s]]]
    fresh = list(extend_lens) == list(seq_lens) and len(bs_idx) == len(seq_lens)
    return {
        "topk": topk,
        "page_size": page_size,
        "max_seqlen_q": max(rows_of, default=0),
        "max_seqlen_k": width,
        "bs_idx": bs_idx,
        "extend_lens": rows_of,
        "cache_seqlens": keys_of,
        "cu_seqlens_k": cu_seqlens_k,
        "seqlens_expanded": lengths,
        "token_to_batch_idx": [bs_idx.index(s) for s in requests],
        "ks": ks,
        "ke": [begin + length for begin, length in zip(ks, lengths, strict=True)],
        "dsa_cache_seqlens": seen,
        "cu_seqlens_q": [sum(rows_of[:i]) for i in range(len(bs_idx) + 1)]
        if requests == sorted(requests)
        else None,
        "dsa_cu_seqlens_k": [sum(seen[:i]) for i in range(len(seen) + 1)],
        "topk_indices_offset": ks if ragged else None,
        "page_table_1": page_table,
        "real_page_table": [[slot // page_size for slot in row[::page_size]] for row in page_table],
        "page_table_1_flattened": concatenated if ragged and not fresh else None,
    }


@st.composite
def batches(draw):
    mode = draw(st.sampled_from([m for m in ForwardMode if m is not ForwardMode.PREBUILT]))
    lens = st.integers(0, 9)
    pairs = draw(st.lists(st.tuples(lens, lens), max_size=5))
    if mode.is_decode_or_idle():
        extend_lens = [1] * len(pairs)
        seq_lens = [prefix + 1 for prefix, _ in pairs]
    else:
        extend_lens = [extend for _, extend in pairs]
        seq_lens = [prefix + extend for prefix, extend in pairs]
        if mode in SPECULATIVE:
            seq_lens = [prefix for prefix, _ in pairs]
    return mode, extend_lens, seq_lens


def assert_equals_restatement(metadata, mode, ragged, *arguments, **more):
    expected = restated(*arguments, **more)
    actual = metadata.to_dict()
    assert actual.pop("forward_mode") == mode
    assert actual.pop("topk_transform_method") == (2 if ragged else 1)
    assert actual == expected


@given(
    batch=batches(), fp8=st.booleans(), page_size=st.sampled_from([1, 4]), topk=st.integers(1, 9)
)
def test_every_field_in_every_mode(batch, fp8, page_size, topk):
    mode, extend_lens, seq_lens = batch
    table = slots_of(len(seq_lens), 20, page_size)
    metadata = build_dsa_metadata(
        extend_lens, seq_lens, forward_mode=mode, topk=topk, fp8_kv_cache=fp8,
        prefill_impl="flashmla_sparse", page_size=page_size, req_to_token=table,
    )  # fmt: skip
    ragged = fp8 and mode is ForwardMode.EXTEND
    assert_equals_restatement(
        metadata, mode, ragged, extend_lens, seq_lens, topk, ragged, table.tolist(), page_size
    )


@given(data=st.data(), strategy=st.sampled_from(["zigzag", "interleave", "contiguous"]))
def test_every_field_under_context_parallelism(data, strategy):
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2), min_size=1, max_size=4))
    extend_lens = [extend for extend, _ in pairs]
    seq_lens = [extend + prefix for extend, prefix in pairs]
    cp_size = data.draw(st.integers(1, 4))
    cp = build_cp_metadata(
        extend_lens, seq_lens, cp_rank=data.draw(st.integers(0, cp_size - 1)), cp_size=cp_size,
        strategy=strategy, kv_len_convention=data.draw(st.sampled_from(["baked", "bare"])),
    )  # fmt: skip
    if data.draw(st.booleans()):
        cp = cp.pad_to_physical()
    table = slots_of(len(pairs), 20, 4)
    metadata = build_dsa_metadata(
        extend_lens, seq_lens, forward_mode=ForwardMode.EXTEND, topk=5, **RAGGED, page_size=4,
        req_to_token=table, cp_metadata=cp,
    )  # fmt: skip
    assert_equals_restatement(
        metadata, ForwardMode.EXTEND, True, extend_lens, seq_lens, 5, True, table.tolist(), 4, cp=cp
    )


def test_decode_and_verify_find_their_lengths():
    decode = build_dsa_metadata(None, [7, 1], forward_mode=ForwardMode.DECODE, topk=4, **RAGGED)
    assert decode.seqlens_expanded.tolist() == [7, 1]
    assert decode.cu_seqlens_q.tolist() == [0, 1, 2]
    assert decode == build_dsa_metadata(
        [1, 1], [7, 1], forward_mode=ForwardMode.DECODE, topk=4, **RAGGED
    )
    verify = build_dsa_metadata(
        None, [2, 9], forward_mode=ForwardMode.TARGET_VERIFY, topk=4, num_draft_tokens=4, **RAGGED
    )
    assert verify.seqlens_expanded.tolist() == [-1, 0, 1, 2, 6, 7, 8, 9]
    assert verify.dsa_cache_seqlens.tolist() == [0, 0, 1, 2, 4, 4, 4, 4]
    assert verify.cu_seqlens_q.tolist() == [0, 4, 8]


def test_rows_of_padding_select_nothing():
    batch = build_dsa_metadata(
        [2], [9], forward_mode=ForwardMode.EXTEND, topk=4, num_rows=4, **PAGED
    )
    assert batch.dsa_cache_seqlens.tolist() == [4, 4, 0, 0]
    assert batch.seqlens_expanded.tolist() == [8, 9]


def test_a_value_that_nobody_changes():
    def build(topk):
        return build_dsa_metadata(
            [3], [5], forward_mode=ForwardMode.EXTEND, topk=topk, **RAGGED,
            req_to_token=[[4, 3, 2, 1, 0]],
        )  # fmt: skip

    batch = build(4)
    assert batch == build(4)
    assert batch != build(3)
    assert repr(batch) == (
        "DsaMetadata(forward_mode=EXTEND, topk_transform_method=RAGGED, topk=4, page_size=1, "
        "extend_lens=[3], cache_seqlens=[5])"
    )
    for name in ("ks", "seqlens_expanded", "page_table_1", "topk_indices_offset"):
        array = getattr(batch, name)
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_sums_beyond_int32_are_none():
    large = 2**31 - 1
    batch = build_dsa_metadata([3], [large], forward_mode=ForwardMode.EXTEND, topk=large, **PAGED)
    assert batch.ke.tolist() == [large - 2, large - 1, large]
    assert batch.dsa_cu_seqlens_k is None


CP = build_cp_metadata([3, 2], [10, 4], cp_rank=0, cp_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extend_lens": None}, "extend_lens must be given in this mode"),
        (
            {"extend_lens": None, "forward_mode": ForwardMode.TARGET_VERIFY},
            "extend_lens must be given in this mode, or num_draft_tokens",
        ),
        ({"num_draft_tokens": 4}, "num_draft_tokens is for ... batches, instead of extend_lens"),
        (
            {"extend_lens": None, "num_draft_tokens": 0, "forward_mode": ForwardMode.TARGET_VERIFY},
            "num_draft_tokens must be >= 1, got 0",
        ),
        ({"extend_lens": [3]}, "extend_lens must have as many elements as seq_lens, 2, got 1"),
        ({"forward_mode": ForwardMode.DECODE}, "extend_lens must be 1 in decode, got 3 at index 0"),
        ({"extend_lens": [3, -1]}, "extend_lens must be ... and fit into int32, got -1 at index 1"),
        ({"extend_lens": [3, 5]}, "seq_lens must be >= extend_lens, got 4 below 5 at index 1"),
        ({"seq_lens": [10, -4]}, "seq_lens must be >= 0 and fit into int32, got -4 at index 1"),
        ({"seq_lens": [2**31 - 2, 2]}, "the sums of ... must fit into int32, got 2147483648 at"),
        ({"forward_mode": ForwardMode.PREBUILT}, "forward_mode must not be PREBUILT"),
        ({"forward_mode": 10}, "forward_mode must be a ForwardMode, got 10"),
        ({"forward_mode": None}, "forward_mode must be given"),
        ({"topk": 0}, "topk must be in [1, 2147483647], got 0"),
        ({"num_rows": 4}, "num_rows must be at least the rows of q, 5, and fit into int32, got 4"),
        ({"req_to_token": np.zeros((1, 10), int)}, "req_to_token must have ... 2 sequences, got 1"),
        (
            {"req_to_token": np.zeros((1, 10), int), "req_pool_indices": [0]},
            "req_pool_indices must have a row for each of the 2 sequences, got 1",
        ),
        (
            {"req_to_token": np.zeros((1, 10), int), "req_pool_indices": [0, 1]},
            "req_pool_indices must be in [0, 1), got 1 at index 1",
        ),
        ({"req_to_token": np.zeros((2, 9), int)}, "req_to_token must have ... longest sequence, "),
        ({"req_to_token": np.array([[0] * 10, [0, -1] + [0] * 8])}, "req_to_token ... at [1, 1]"),
        ({"req_to_token": np.full((2, 10), 6), "page_size": 4}, "key 0 must ... 0 of req_to_token"),
        (
            {"req_to_token": np.array([[*range(9), 10], [0] * 10]), "page_size": 9},
            "key 9 must be the first of a page of 9, got slot 10 in row 0 of req_to_token",
        ),
        ({"cp_metadata": CP, "seq_lens": [10, 5]}, "cp_metadata must be ... got 2 + 2 at index 1"),
        ({"cp_metadata": CP, "seq_lens": [10], "extend_lens": [3]}, "cp_metadata ... got one of 2"),
        (
            {"cp_metadata": CP, "forward_mode": ForwardMode.TARGET_VERIFY},
            "cp_metadata is for EXTEND, MIXED and DRAFT_EXTEND_V2",
        ),
    ],
)
def test_errors(change, message):
    case = {
        "extend_lens": [3, 2],
        "seq_lens": [10, 4],
        "forward_mode": ForwardMode.EXTEND,
        "topk": 4,
        **RAGGED,
    } | change
    message = re.escape(message).replace(r"\.\.\.", ".*")
    with pytest.raises(ValueError, match=f"^build_dsa_metadata: {message}"):
        build_dsa_metadata(**case)


def test_slots_beyond_a_sequence_may_be_anything_that_fits():
    table = np.array([[0, 1, 2, 3], [8, 9, -1, 7]])
    batch = build_dsa_metadata(
        [4, 2], [4, 2], forward_mode=ForwardMode.EXTEND, topk=4, **PAGED, page_size=2,
        req_to_token=table,
    )  # fmt: skip
    np.testing.assert_array_equal(batch.page_table_1, table)
    np.testing.assert_array_equal(batch.real_page_table, [[0, 1], [4, -1]])
