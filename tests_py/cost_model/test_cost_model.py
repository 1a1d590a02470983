# SPDX-License-Identifier: Apache-2.0
"""The cost model: its work and bytes are exact, its seconds follow from them."""

import re

import numpy as np
import pytest

import cpattn
from cpattn_lab.cost_model import AttentionLayer, Rates, predict, rank_work
from cpattn_lab.cost_model.work import PACKING_ROWS
from support.pairwise import pairwise

STRATEGIES = ("zigzag", "interleave", "contiguous")
BATCHES = [
    ([29], [29]),
    ([13, 40, 9], [77, 40, 16]),
    ([1, 1, 1, 30, 18, 2], [10, 34, 2, 30, 30, 5]),
    ([0, 11, 0], [8, 13, 0]),
    ([1], [7]),
    ([700, 2], [705, 3002]),
]
LONG = [9000, 40], [9000, 5040]
LAYER = AttentionLayer(num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=16, dtype="float16")


def plans_of(batch, strategy, cp_size):
    return cpattn.build_cp_metadata_all_ranks(*batch, cp_size=cp_size, strategy=strategy)


def last_rows(plan, cp_size, strategy):
    """Return a bool for each row of a plan: whether it ends a block of rows for one item."""
    lengths, requests = plan.query_cache_lengths, plan.query_request_indices
    step = cp_size if strategy == "interleave" else 1
    goes_on = (np.diff(requests) == 0) & (np.diff(lengths) == step)
    if strategy == "zigzag":  # the second block of a request may begin where the first ends
        goes_on[plan.total_q_prev_tokens - 1 : plan.total_q_prev_tokens] = False
    return np.append(~goes_on, True)[: len(lengths)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_packed_keys_are_those_of_the_plans(strategy, cp_size):
    options = {"cp_size": cp_size, "strategy": strategy}
    for extends, seq_lens in BATCHES:
        short = [min(n, 384) for n in extends], seq_lens
        work = rank_work(*short, **options, layer=AttentionLayer(num_heads=1, num_kv_heads=1))
        for rank, plan in enumerate(plans_of(short, strategy, cp_size)):
            ends = last_rows(plan, cp_size, strategy)
            assert work.packed_keys[rank] == plan.query_cache_lengths[ends].sum()
        endless = rank_work(*short, **options, layer=AttentionLayer(window=1 << 50))
        assert endless.pairs.tolist() == work.pairs.tolist()


LAYERS = [
    AttentionLayer(),
    AttentionLayer(num_heads=8, head_dim=576, dtype="float32"),
    AttentionLayer(window=0),
    AttentionLayer(window=100),
    AttentionLayer(num_heads=64, window=2000),
    AttentionLayer(window=(100, 40)),
    AttentionLayer(window=(None, 700)),
    AttentionLayer(window=(None, None)),
]


@pytest.mark.parametrize(("layer", "batch", "cp_size"), pairwise(LAYERS, [*BATCHES, LONG], (1, 3)))
def test_items_are_those_of_attention_plans(batch, cp_size, layer):
    work = rank_work(*batch, cp_size=cp_size, strategy="zigzag", layer=layer)
    sizes = {name: getattr(layer, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    for rank, cp in enumerate(plans_of(batch, "zigzag", cp_size)):
        q_lens = cp.actual_seq_q_prev_list + cp.actual_seq_q_next_list
        own = kv_lens = cp.kv_len_prev_list + cp.kv_len_next_list
        if layer.keys_behind:
            kv_lens = 2 * batch[1]
        tables = np.zeros((len(q_lens), max(kv_lens)), np.int32)
        lens = {"q_lens": q_lens, "kv_lens": kv_lens, "block_tables": tables}
        lens["first_positions"] = np.subtract(own, q_lens)
        lens["causal"] = not layer.keys_behind
        options = {"page_size": 1, "num_pages": 1, "window": layer.window, "batch_invariant": True}
        plan = cpattn.plan_attention(**lens, **sizes, **options)
        pairs = work.pairs[rank] * layer.num_heads
        packing = PACKING_ROWS * work.packed_keys[rank] * layer.num_kv_heads
        # The bound is one key of each item, which begins and ends at a whole token.
        one_key = PACKING_ROWS * len(plan.items) * (1 if layer.window is None else 2)
        assert pairs + packing == pytest.approx(int(plan.item_costs.sum()), abs=one_key)
        longest = max(plan.item_costs.tolist(), default=0)
        # Pieces differ by one token, with its keys in each head of an item.
        token = max(kv_lens) * max(plan.items[:, 4].tolist(), default=0)
        assert work.longest_item[rank] == pytest.approx(longest, abs=token + PACKING_ROWS)


def test_time_is_the_sum_of_its_terms():
    """Each of two ranks has two pieces of two tokens of a sequence: rows 0, 1, 6 and 7, or 2 to 5,
    which see the keys up to their own."""
    layer = AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=16, dtype="float32", num_layers=3)
    rates = Rates(  # 1000 flops per second
        gflops=1e-6, pack_rows=5, row_keys=7, call_us=2e6, gather_gb_per_s=1e-6, latency_us=3e6,
        message_us=1e6, store_gb_per_s=2e-6,
    )  # fmt: skip
    forecast = predict([([8], [12])], layer, rates, cp_size=2)
    pairs, row_bytes, key_flops = 34, 2 * 16 * 4, 2 * 2 * 16
    packed = {0: 6 + 12, 1: 8 + 10}  # keys that the last row of each block sees
    for rank in range(2):
        rows = pairs * 2 + 7 * 4 * 2 + 5 * packed[rank]
        assert forecast.attention_seconds[rank] == pytest.approx(2 + rows * key_flops / 1000)
    assert forecast.gather_seconds.tolist() == [2 * (3 + 1) + 4 * row_bytes / 1000] * 2
    assert forecast.store_seconds == 8 * row_bytes / 2000
    slowest = max(forecast.attention_seconds)
    whole = slowest + forecast.gather_seconds[0] + forecast.store_seconds
    assert forecast.layer_seconds == pytest.approx(whole)
    assert forecast.model_seconds == pytest.approx(3 * whole)
    alone = 2 + (68 * 2 + 7 * 8 * 2 + 5 * 12) * key_flops / 1000 + forecast.store_seconds
    assert forecast.single_rank_seconds == pytest.approx(alone)
    assert forecast.speedup == pytest.approx(alone / whole)
    assert forecast.efficiency == pytest.approx(alone / whole / 2)
    assert forecast.attention_share == pytest.approx(slowest / whole)


SHARES = {"placement": "page_interleave", "exchange": "ring", "overlap": "full"}


@pytest.mark.parametrize("ways", [{"strategy": "contiguous"}, SHARES])
def test_batches_add_up_and_wait_for_the_slowest_rank_of_each(ways):
    batches = [([700, 2], [705, 3002]), ([13, 40, 9], [77, 40, 16])]
    both, *parts = (
        predict(some, LAYER, Rates(gflops=100), cp_size=4, **ways)
        for some in (batches, batches[:1], batches[1:])
    )
    for name in ("layer_seconds", "hidden_seconds", "single_rank_seconds", "new_tokens"):
        assert getattr(both, name) == pytest.approx(sum(getattr(part, name) for part in parts))
    for name in ("pool_bytes", "scratch_bytes"):
        assert getattr(both, name) == max(getattr(part, name) for part in parts)
    assert both.pairs.tolist() == (parts[0].pairs + parts[1].pairs).tolist()
    slowest = sum(part.pairs.max() for part in parts)
    assert both.imbalance == pytest.approx(slowest / both.pairs.mean())


def test_threads_without_an_item_are_idle():
    """One token in one head is one item for any number of threads."""
    layer = AttentionLayer(num_heads=1, num_kv_heads=1)
    one, many = (
        predict([([1], [4097])], layer, Rates(gflops=10 * n, threads=n, call_us=0), cp_size=1)
        for n in (1, 64)
    )
    ratio = one.attention_seconds[0] / many.attention_seconds[0]
    assert 1 <= ratio < 3  # packing of the longest item counts PACKING_ROWS


def test_fit_finds_the_rates_behind_timings():
    from cpattn_lab.cost_model.calibration import Sample, _gflops, fit, lse_share, read_rows

    flops, pack_rows, row_keys, call = 4e11, 20.0, 60.0, 5e-6
    samples = []
    works = (1e10, 1e7, 1e6), (1e9, 5e7, 1e5), (1e8, 1e6, 3e6), (0, 0, 4e3)
    for products, packing, rows in works:
        seconds = (products + pack_rows * packing + row_keys * rows) / flops + call
        samples.append(Sample(products, packing, rows, seconds))
    rates = fit(samples)
    assert rates == pytest.approx({"gflops": 400, "pack_rows": 20, "row_keys": 60, "call_us": 5})
    halved = [sample._replace(seconds=(sample.seconds + call) / 2) for sample in samples]
    assert _gflops(halved, rates) == pytest.approx(800)  # two threads; calls take as long
    step = Sample(1e8, 5e7, 1e5, (1e8 + 11 * 5e7 + row_keys * 1e5) / flops + call)
    assert read_rows(step, rates) == pytest.approx(11)
    assert read_rows(step._replace(seconds=call), rates) == 0
    slower = [sample._replace(seconds=1.5 * sample.seconds) for sample in samples]
    assert lse_share(samples, slower) == pytest.approx(0.5)
    assert lse_share(slower, samples) == 0  # noise
    faster = [sample._replace(seconds=sample.products / flops + 1e-9) for sample in samples]
    assert min(fit(faster).values()) >= 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AttentionLayer(head_dim=577), "head_dim must be at most 576, got 577"),
        (lambda: AttentionLayer(window=-1), r"window must be >= 0 \(0: a token sees its.*, got -1"),
        (lambda: AttentionLayer(dtype="int8"), "one of float32, float16, bfloat16, got 'int8'"),
        (
            lambda: AttentionLayer(head_dim=64, v_head_dim=128, latent=True),
            "v_head_dim must be at most head_dim = 64 in a layer of latents, got 128",
        ),
        (lambda: AttentionLayer(bias="int8"), "bias must be alibi or one of float32, float16, bf"),
        (lambda: AttentionLayer(latent=1), "latent must be a bool, got int"),
        (lambda: rank_work([3], [4, 5], cp_size=2), "as many elements as extend_lens, got 2 and 1"),
        (lambda: rank_work([3], [2], cp_size=2), "seq_lens must be >= extend_lens, got 2"),
        (lambda: predict([], LAYER, Rates(gflops=1), cp_size=2), "at least one batch"),
        (lambda: predict([([0], [9])], LAYER, Rates(gflops=1), cp_size=2), "must have new tokens"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    is_type = re.search("an integer|a number|a bool", message)
    with pytest.raises(TypeError if is_type else ValueError, match=message):
        call()
