# SPDX-License-Identifier: Apache-2.0
"""Keys, their ranks, and bytes of every exchange agree with counting one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn.distributed.layers.ring import ring_pages
from cpattn.distributed.plans.sequence_call import Visibility, sequence_call
from cpattn.distributed.plans.tokens import Rows
from cpattn.kv import PageInterleave, TokenInterleave
from cpattn_lab.cost_model import AttentionLayer, Rates, exchange_work, predict, rank_work
from cpattn_lab.cost_model.placement import pages_per_rank, stripes
from support.cost_model.exchange_cases import (
    COUNTED,
    EXCHANGES,
    SHARDED,
    Wire,
    cases,
    count_rows_to_pools,
)
from support.distributed.planning import key_shares
from support.tolerances import SEQUENCE_ENDS


@given(case=cases(), exchange=st.sampled_from(EXCHANGES))
def test_bytes_and_rows_are_those_of_messages_counted_one_by_one(case, exchange):
    if (case.placement, exchange) == ("replicated", "pass_q"):
        return
    work = case.work(exchange)
    wire, busy, back = COUNTED[exchange](case)
    pools = Wire(case) if exchange == "gather" else count_rows_to_pools(case)
    sent, received = pools.sent + wire.sent, pools.received + wire.received
    if back:
        sent, received = sent + back.sent, received + back.received
    assert work.sent_bytes.tolist() == wire.totals(sent)
    assert work.received_bytes.tolist() == wire.totals(received)
    assert work.wire_bytes[0].tolist() == pools.by_host()
    assert work.wire_bytes[1].tolist() == busy
    assert work.wire_bytes[2].tolist() == (back.by_host() if back else [0] * case.num_hosts)
    assert work.sent_bytes.dtype == work.received_bytes.dtype == np.int64
    merged = Counter()  # partial results of separate keys
    for rank, tokens in enumerate(case.computed()):
        if exchange in ("ring", "pass_q") and case.num_hosts > 1:
            merged[rank] += case.num_hosts * len(tokens)
        if exchange == "pass_q" and case.ranks_per_host > 1:  # a host's ranks merge for the rail
            for peer in range(rank % case.ranks_per_host, case.cp_size, case.ranks_per_host):
                merged[peer] += case.ranks_per_host * len(tokens)
    expected = [case.layer.num_heads * merged[rank] for rank in range(case.cp_size)]
    assert work.merged_rows.tolist() == expected


@given(case=cases(SHARDED))
def test_the_rank_that_keeps_a_key_attends_to_it_for_all_tokens(case):
    """Every new row is written to one pool, and every exchange computes the same pairs."""
    work = case.work("pass_q")
    owner, pairs, arriving = case.owners(), Counter(), Counter()
    for rank, tokens in enumerate(case.computed()):
        for token in tokens:
            arriving[case.host(owner[token]), rank % case.ranks_per_host] += 1
            for position in case.visible(token):
                pairs[owner[token[0], position]] += 1
    assert work.pairs.tolist() == [pairs[rank] for rank in range(case.cp_size)]
    layer = case.layer
    page = layer.page_size * layer.kv_row_bytes * layer.num_layers
    assert work.pool_bytes == max(case.pages) * page
    stored = work.stored_bytes.reshape(case.num_hosts, -1)
    for place, rows in np.ndenumerate(stored):
        assert rows == arriving[place] * layer.kv_row_bytes
    assert stored.sum() == sum(case.extends) * layer.kv_row_bytes
    works = [case.work(exchange) for exchange in EXCHANGES]
    assert len({int((work.pairs * work.heads).sum()) for work in works}) == 1


@given(case=cases(("replicated",)))
def test_a_gather_over_single_ranks_is_that_of_rank_work(case):
    case.ranks_per_host = 1
    work = case.work("gather")
    options = {"cp_size": case.cp_size, "strategy": case.strategy, "layer": case.layer}
    known, of_ranks = rank_work(case.extends, case.seq_lens, **options), case.computed()
    assert known.tokens.tolist() == [len(tokens) for tokens in of_ranks]
    pairs = [sum(len(case.visible(x)) for x in tokens) for tokens in of_ranks]
    assert known.pairs.tolist() == pairs
    for name in ("tokens", "pairs", "longest_item", "sent_bytes", "received_bytes"):
        assert getattr(work, name).tolist() == getattr(known, name).tolist()
    assert (
        work.stored_bytes.tolist() == [sum(case.extends) * case.layer.kv_row_bytes] * case.cp_size
    )
    assert work.pool_bytes == case.layer.pool_bytes(np.array(case.seq_lens))


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    ends=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    cp_size=st.integers(1, 6),
    page_size=st.integers(1, 5),
    placement=st.sampled_from(SHARDED),
)
def test_stripes_are_counted_and_summed(lengths, ends, cp_size, page_size, placement):
    seq_lens = np.array(lengths)
    laid = stripes(placement, seq_lens, cp_size, page_size)
    end = np.minimum(ends[: len(lengths)], seq_lens)
    counts, sums = laid.count_below(end), laid.sum_below(end)
    for i, last in enumerate(end):
        positions = np.arange(last)
        owners = laid.owners(positions, np.full(last, i))
        for rank in range(cp_size):
            assert counts[rank, i] == (owners == rank).sum()
            assert sums[rank, i] == positions[owners == rank].sum()
    assert pages_per_rank(placement, seq_lens, cp_size, page_size).max() * page_size >= (
        laid.count_below(seq_lens).sum(1).max()
    )


@pytest.mark.parametrize("exchange", ["gather", "pass_q"])
def test_long_prefixes_over_a_thousand_ranks_are_counted(exchange):
    options = {"cp_size": 1024, "placement": "page_interleave", "exchange": exchange}
    work = exchange_work([1 << 20] * 2, [(1 << 31) - 1] * 2, **options)
    total = sum(range((1 << 31) - (1 << 20), 1 << 31)) * 2
    assert sum(work.pairs.tolist()) == total
    assert max(work.pairs) / (total / 1024) < 1.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "striped"}, "placement must be one of replicated, page_interleave, token"),
        ({"exchange": "auto"}, "exchange must be one of gather, ring, pass_q, all_to_all, usp"),
        ({"state_dtype": "int8"}, "state_dtype must be one of float32, float16, bfloat16, got"),
        ({"ranks_per_host": 3}, "cp_size must be a multiple of ranks_per_host = 3, got 4"),
        ({"ranks_per_host": 0}, "ranks_per_host must be >= 1, got 0"),
        ({"cp_size": 0}, "cp_size must be >= 1, got 0"),
        ({"strategy": "odd"}, "strategy"),
        ({"seq_lens": [2]}, "exchange_work: seq_lens must be >= extend_lens, got 2"),
        ({"ranks_per_host": 1.0}, r"ranks_per_host must be an integer, got 1\.0"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(TypeError if "an integer" in message else ValueError, match=message):
        exchange_work(**{"extend_lens": [3], "seq_lens": [3], "cp_size": 4} | arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extend_lens": 5}, "extend_lens must be"),
        ({"seq_lens": ["a"]}, "seq_lens must hold integers"),
        ({"layer": np.ones(2)}, "layer must be of AttentionLayer, got ndarray"),
        ({"layer": 0}, "layer must be of AttentionLayer, got int"),
    ],
)
@pytest.mark.parametrize("function", [exchange_work, rank_work, predict])
def test_arguments_of_other_kinds_are_named(function, change, message):
    given = {"extend_lens": [3], "seq_lens": [3], "layer": AttentionLayer(), "cp_size": 2} | change
    if function is predict:
        given["batches"] = [(given.pop("extend_lens"), given.pop("seq_lens"))]
        given["rates"] = Rates(gflops=1)
    with pytest.raises(TypeError, match=f"^{function.__name__}: {message}"):
        function(**given)


@pytest.mark.parametrize("batches", [None, 5, [5], [None]])
def test_batches_of_other_kinds_are_named(batches):
    with pytest.raises(TypeError, match=r"predict: batches(\[0\])? must be a sequence, got "):
        predict(batches, AttentionLayer(), Rates(gflops=1), cp_size=2)


PAGE = 32


def keys_of(size, placement, length):
    made = {
        "page_interleave": lambda: PageInterleave(shard_size=size, page_size=PAGE),
        "token_interleave": lambda: TokenInterleave(shard_size=size, interleave=1),
        "token_interleave:16": lambda: TokenInterleave(shard_size=size, interleave=16),
    }[placement]()
    pages = -(-length // PAGE)
    return key_shares(made, np.arange(pages, dtype=np.int32)[None], np.array([length]), PAGE)


def packed_keys(shares, size, rows, item):
    """Return the number of keys that items of work pack, in calls to all shares."""
    packed = 0
    for share in range(size):
        pages = ring_pages(shares, share)
        call = sequence_call(shares, share, pages, rows, Visibility(True, None, None))
        ends = call.key_ranges[1::2]
        pieces = -(-len(ends) // item)
        packed += ends[len(ends) * np.arange(1, pieces + 1) // pieces - 1].sum()
    return packed


@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_pages_of_runs_are_those_that_the_first_rank_fills(interleave):
    lens = np.array([1, 10, 40, 129])
    kept = TokenInterleave(shard_size=3, interleave=interleave).local_lens(lens, 0)
    pages = pages_per_rank(f"token_interleave:{interleave}", lens, 3, PAGE)
    assert pages.tolist() == [int((-(-kept // PAGE)).sum())] * 3


@pytest.mark.parametrize(
    "placement", ["page_interleave", "token_interleave", "token_interleave:16"]
)
def test_a_ring_packs_the_keys_of_all_shares_for_each_item(placement):
    """Each rank has zigzag rows in items of 510 tokens."""
    size, new, length = 2, 3400 * PAGE, 4096 * PAGE
    layer = AttentionLayer(num_heads=4, num_kv_heads=1, head_dim=128, page_size=PAGE)
    work = exchange_work(
        [new], [length], cp_size=size, layer=layer, placement=placement, exchange="ring"
    )
    plans = cpattn.build_cp_metadata_all_ranks([new], [length], cp_size=size)
    shares = keys_of(size, placement, length)
    for rank, plan in enumerate(plans):
        positions = np.asarray(plan.query_cache_lengths, np.int64) - 1
        rows = Rows(np.zeros(len(positions), np.int64), positions)
        packed = packed_keys(shares, size, rows, item=510)
        assert work.packed_keys[rank] == pytest.approx(packed, rel=SEQUENCE_ENDS)
