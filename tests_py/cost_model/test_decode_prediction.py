# SPDX-License-Identifier: Apache-2.0
"""Prediction of a decode step: keys and bytes are counted one by one, seconds by hand."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn_lab.cost_model import AttentionLayer, Rates, predict_decode

RATES = Rates(gflops=100, gather_gb_per_s=1)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_hosts=st.integers(1, 4),
    ranks_per_host=st.integers(1, 3),
    page_size=st.integers(1, 5),
    window=st.none() | st.integers(0, 20),
    placement=st.sampled_from(["page_interleave", "token_interleave", "token_interleave:3"]),
    state=st.sampled_from([("float32", 4), ("bfloat16", 2)]),
    exchange=st.sampled_from(["all_to_all", "gather"]),
    out_heads=st.sampled_from(["own", "all"]),
)
def test_keys_and_bytes_are_those_counted_one_by_one(
    lengths, num_hosts, ranks_per_host, page_size, window, placement, state, exchange, out_heads
):
    layer = AttentionLayer(
        num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=16, page_size=page_size, window=window
    )
    size = num_hosts * ranks_per_host
    step = predict_decode(
        lengths, layer, RATES, cp_size=size, placement=placement, ranks_per_host=ranks_per_host,
        state_dtype=state[0], exchange=exchange, out_heads=out_heads,
    )  # fmt: skip
    assert (step.exchange, step.out_heads, step.alternatives) == (exchange, out_heads, {})
    keys, load = Counter(), [0] * size
    for length in lengths:
        base = load.index(min(load)) if placement == "page_interleave" else 0
        stripe = page_size if placement == "page_interleave" else 1 + 2 * placement.endswith("3")
        for page in range(-(-length // page_size)):
            load[(base + page) % size] += 1
        first = 0 if window is None else max(length - 1 - window, 0)
        keys.update((base + t // stripe) % size for t in range(first, length))
    assert step.keys.tolist() == [keys[rank] for rank in range(size)]
    assert step.imbalance == pytest.approx(max(keys.values()) * size / sum(keys.values()))
    heads = [6 * (rank + 1) // size - 6 * rank // size for rank in range(size)]
    sent, received = Counter(), Counter()
    for source in range(size):  # sends its host's merged states to its place on other hosts
        for target in range(source % ranks_per_host, size, ranks_per_host):
            if target == source:
                continue
            place = source % ranks_per_host  # gather sends its share of all heads
            rail = 6 * (place + 1) // ranks_per_host - 6 * place // ranks_per_host
            by_heads = exchange == "all_to_all"
            nbytes = (heads[target] if by_heads else rail) * (16 * state[1] + 4)
            if by_heads and out_heads == "all":
                nbytes += heads[source] * (16 * 2 + 4)  # merged results in bfloat16
            sent[source] += len(lengths) * nbytes
            received[target] += len(lengths) * nbytes
    assert step.sent_bytes.tolist() == [sent[rank] for rank in range(size)]
    assert step.received_bytes.tolist() == [received[rank] for rank in range(size)]


def test_seconds_are_the_sum_of_their_terms():
    """Two ranks have 24 keys each, of sequences of 32 and 16 tokens."""
    layer = AttentionLayer(
        num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", num_layers=3, page_size=8
    )
    rates = Rates(
        gflops=1e-6, pack_rows=99, read_rows=5, row_keys=7, call_us=2e6, lse_share=0.5,
        merge_ns=1e6, gather_gb_per_s=1e-6, latency_us=3e6, message_us=1e6, store_gb_per_s=2e-6,
    )  # fmt: skip
    step = predict_decode([32, 16], layer, rates, cp_size=2)
    flops, row = 2 * 2 * 16, 2 * 32 * 4
    attention = 2 + ((1.5 * 24 + 7 * 2) * 4 + 5 * 24 * 2) * flops / 1000
    assert step.attention_seconds == pytest.approx(attention)
    state = 2 * 2 * (16 * 4 + 4)  # two heads of two sequences
    merge = 2 * 2 * 2 * 16 / 1000  # these heads, from each of two ranks
    assert step.exchange_seconds == pytest.approx(2 * (3 + 1) + state / 1000 + merge)
    assert step.store_seconds == 2 * row / 2000  # both new tokens end a page of rank 1
    whole = attention + step.exchange_seconds[0] + step.store_seconds
    assert step.layer_seconds == pytest.approx(whole)
    assert step.model_seconds == pytest.approx(3 * whole)
    assert step.tokens_per_second == pytest.approx(2 / (3 * whole))
    alone = 2 + ((48 + 7 * 2) * 4 + 5 * 48 * 2) * flops / 1000 + 2 * row / 2000
    assert step.single_rank_seconds == pytest.approx(alone)
    assert step.speedup == pytest.approx(alone / whole)
    assert step.pool_bytes == 3 * 8 * row * 3


def test_a_round_for_the_heads_of_all_has_seconds_of_its_own():
    layer = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=16, dtype="float16")
    rates = Rates(gflops=1, gather_gb_per_s=1e-6, latency_us=3e6, message_us=1e6)
    asked = {"cp_size": 4, "state_dtype": "float32"}
    step = predict_decode([32, 16], layer, rates, **asked, out_heads="all")
    states, merged = 2 * 3 * (16 * 4 + 4), 2 * 3 * (16 * 2 + 4)  # a head for three ranks
    assert step.exchange_seconds.tolist() == pytest.approx([3 * 6 + (states + merged) / 1000] * 4)
    gathered = predict_decode([32, 16], layer, rates, **asked, out_heads="all", exchange="gather")
    assert gathered.exchange_seconds.tolist() == pytest.approx([2 * 6 + 4 * states / 1000] * 4)


@pytest.mark.parametrize(
    ("num_sequences", "out_heads", "taken"),
    [(1, "all", "gather"), (256, "all", "all_to_all"), (1, "own", "all_to_all")],
)
def test_auto_is_the_exchange_that_takes_less(num_sequences, out_heads, taken):
    lengths, layer = [4096] * num_sequences, AttentionLayer()
    options = {"cp_size": 8, "out_heads": out_heads}
    step = predict_decode(lengths, layer, RATES, exchange="auto", **options)
    assert step.exchange == taken
    for exchange, seconds in step.alternatives.items():
        single = predict_decode(lengths, layer, RATES, exchange=exchange, **options)
        assert seconds == single.exchange_seconds.max()
        assert seconds >= step.exchange_seconds.max()


def test_one_rank_and_ranks_of_one_host_send_nothing():
    layer, lengths = AttentionLayer(), np.array([4096] * 3)
    for ranks in (1, 4):
        step = predict_decode(lengths, layer, RATES, cp_size=ranks, ranks_per_host=ranks)
        assert not step.sent_bytes.any()
        parts = 0 if ranks == 1 else ranks  # each rank merges so many, for its share of the heads
        merged = 3 * 32 * 128 * parts / ranks
        assert step.exchange_seconds == pytest.approx(1e-9 * RATES.merge_ns * merged)
        assert step.num_sequences == 3
        assert ranks > 1 or step.speedup == pytest.approx(1)
    with pytest.raises(TypeError, match=r"predict_decode: seq_lens must be an integer, got 2\.5"):
        predict_decode([2.5], layer, RATES, cp_size=2)


def test_crowded_cpus_make_a_step_longer():
    rates = Rates(gflops=100, threads=4)
    steps = [
        predict_decode([1 << 17] * 4, AttentionLayer(), rates, cp_size=4, cpus=cpus)
        for cpus in (4, 1)
    ]
    assert steps[1].attention_seconds == pytest.approx(4 * steps[0].attention_seconds)
    assert steps[1].sent_bytes.tolist() == steps[0].sent_bytes.tolist()


@pytest.mark.parametrize(
    ("seq_lens", "arguments", "message"),
    [
        ([], {}, "predict_decode: seq_lens must have a sequence, got none"),
        ([3, 0], {}, "predict_decode: seq_lens must be >= 1, got 0"),
        ([3], {"placement": "pages"}, "predict_decode: placement must be one of"),
        ([3], {"ranks_per_host": 4}, "cp_size must be a multiple of ranks_per_host = 4, got 2"),
        ([3], {"state_dtype": "fp8"}, "state_dtype must be one of float32, float16, bfloat16"),
        ([3], {"out_heads": "some"}, "predict_decode: out_heads must be one of own, all, got"),
        ([3], {"cpus": -1}, "predict_decode: cpus must be >= 1, got -1"),
    ],
)
def test_what_cannot_be_is_refused(seq_lens, arguments, message):
    with pytest.raises(ValueError, match=message):
        predict_decode(seq_lens, AttentionLayer(), RATES, **({"cp_size": 2} | arguments))
