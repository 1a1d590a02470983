# SPDX-License-Identifier: Apache-2.0
"""Seconds of every exchange agree with counts by hand: alone, behind attention, over hosts and on
crowded CPUs. So do figures and words of docs/how_to/placing_keys.md."""

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn_lab.cost_model import AttentionLayer, Rates, predict
from support.command_line import invoke
from support.places import ROOT

#: A flop, a byte and a message take whole numbers of seconds, or halves.
RATES = Rates(
    gflops=1e-6, pack_rows=0, row_keys=0, call_us=2e6, lse_share=0.5, merge_ns=1e6,
    gather_gb_per_s=1e-6, latency_us=3e6, message_us=1e6, store_gb_per_s=2e-6,
)  # fmt: skip
LAYER = AttentionLayer(
    num_heads=16, num_kv_heads=4, head_dim=16, dtype="float32", num_layers=3, page_size=2
)
BATCH = [16], [32]
ROW = 4 * 32 * 4  # bytes of keys and values of four heads
QUERY, STATE = 16 * 16 * 4, 16 * (16 * 4 + 4)  # bytes of a token, in all heads
PAIR = 2 * 32 / 1000  # seconds of a query with a key, in one head
PAIRS = sum(range(17, 33)) // 4  # query-key pairs of each of four ranks
MERGED = 16 * 16 / 1000  # seconds of merging a token of a part, in all heads
EXCHANGE = 3 + 3 * 1  # seconds of messages among four ranks: a latency, three peers


def moved_rows(rank):
    """Count new rows that a rank computes by zigzag, in blocks of two, and another rank keeps."""
    computed = [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
    return sum((16 + token) % 4 != rank for token in computed)


#: Seconds of moving new rows; every rank sends and receives equally many.
MOVED = EXCHANGE + moved_rows(0) * ROW / 1000


def placed(exchange, overlap="none", **options):
    options = {"cp_size": 4, "placement": "token_interleave"} | options
    return predict([BATCH], LAYER, RATES, exchange=exchange, overlap=overlap, **options)


def test_a_gather_of_shards_brings_cached_rows_too():
    forecast = placed("gather")
    assert [moved_rows(rank) for rank in range(4)] == [3] * 4
    seconds = EXCHANGE + EXCHANGE + 3 * (4 + 4) * ROW / 1000  # new rows go once, with cached ones
    assert forecast.gather_seconds == pytest.approx(seconds)
    assert forecast.attention_seconds == pytest.approx(2 + PAIRS * 16 * PAIR)
    assert forecast.store_seconds == (4 + 32) * ROW / 2000  # its own 4 rows, and all into scratch
    assert forecast.scratch_bytes == 32 * ROW
    assert forecast.pool_bytes == 4 * 2 * ROW * 3  # 8 tokens in pages of 2, in 3 layers


def test_a_ring_takes_turns_with_its_blocks():
    forecast = placed("ring")
    step = 3 + 1 + 8 * ROW / 1000
    assert forecast.gather_seconds == pytest.approx(EXCHANGE + MOVED + 3 * step)
    whole = 4 * 2 + 1.5 * PAIRS * 16 * PAIR  # a call for each block, with LSE
    merge = 4 * 4 * MERGED  # its 4 tokens, for each block
    assert forecast.attention_seconds == pytest.approx(whole + merge)
    assert forecast.store_seconds == 4 * ROW / 2000
    assert forecast.scratch_bytes == 2 * 8 * ROW
    hidden = placed("ring", "full")
    part = (whole + 12 * 2 + forecast.store_seconds) / 16  # a call for each of four KV heads
    new = EXCHANGE + (MOVED - EXCHANGE) / 4  # new rows of one head
    steps = 3 * step + 3 * 3  # a message for each head
    turns = max(new + 16 * part, MOVED + steps + part) + merge
    assert hidden.layer_seconds == pytest.approx(EXCHANGE + turns)
    assert hidden.hidden_seconds == pytest.approx(forecast.layer_seconds - hidden.layer_seconds)


def test_queries_go_out_and_states_come_back():
    forecast = placed("pass_q")
    before, after = 3 * 4 * QUERY, 12 * STATE
    seconds = EXCHANGE + MOVED + 2 * EXCHANGE + (before + after) / 1000
    assert forecast.gather_seconds == pytest.approx(seconds)
    owned = [sum(min(16, 32 - key) for key in range(rank, 32, 4)) for rank in range(4)]
    assert forecast.pairs.tolist() == owned
    merge = 4 * 4 * MERGED
    expected = [2 + 1.5 * n * 16 * PAIR + merge for n in owned]
    assert forecast.attention_seconds == pytest.approx(expected)
    assert forecast.store_seconds == 4 * ROW / 2000
    hidden = placed("pass_q", "full")
    attention = 2 + 1.5 * max(owned) * 16 * PAIR + 3 * 2  # four calls of a quarter each
    head = (attention + forecast.store_seconds) / 4
    there = EXCHANGE + (MOVED - EXCHANGE) / 4 + EXCHANGE + before / 4000  # new rows, and queries
    back = EXCHANGE + after / 4000
    turns = there + 3 * max(head, there + back) + head + back + merge
    assert hidden.layer_seconds == pytest.approx(EXCHANGE + turns)


def test_heads_are_exchanged_in_parts():
    forecast = placed("all_to_all", placement="replicated", cp_size=2)
    one = 3 + 1  # a latency, one peer
    half = 8 * (QUERY + ROW) // 2  # queries, keys and values of the other's heads, for 8 tokens
    back = 8 * 8 * 16 * 4
    assert forecast.gather_seconds == pytest.approx(3 * one + (half + back) / 1000)
    attention = 2 + sum(range(17, 33)) * 8 * PAIR  # a rank has eight heads
    assert forecast.attention_seconds == pytest.approx(attention)
    assert forecast.store_seconds == 16 * ROW / 2 / 2000
    assert forecast.pool_bytes == 32 * ROW * 3 // 2
    # Each rank has two KV heads: one is exchanged while the other is attended to.
    hidden = placed("all_to_all", "full", placement="replicated", cp_size=2)
    a = (attention + 2 + forecast.store_seconds) / 2
    b, c = one + half / 2000, one + back / 2000
    assert hidden.layer_seconds == pytest.approx(one + b + max(a, b + c) + a + c)


def test_a_mesh_swaps_heads_in_its_rows_and_passes_keys_round():
    """A mesh has two rows of two ranks, each with half of the heads; a row has 16 tokens' keys."""
    forecast = placed("usp", mesh=(2, 2))
    one = 3 + 1  # a latency, one peer, both in a row and on the ring
    swap = 4 * QUERY // 2 + 8 * ROW // 2  # its 4 tokens, and 8 keys, in the heads of the other
    step = 16 * ROW // 2  # keys of a row
    back = 4 * (QUERY // 2 + 8 * 4)  # results and their LSE
    assert forecast.sent_bytes.tolist() == [3 * ROW + swap + step + back] * 4
    seconds = EXCHANGE + MOVED + 4 * one + (swap + step + back) / 1000
    assert forecast.gather_seconds == pytest.approx(seconds)
    attention = 2 * 2 + 1.5 * 2 * PAIRS * 8 * PAIR  # a call for each row, with half of the heads
    merge = 2 * 8 * MERGED / 2  # 8 tokens of its row, for each row
    assert forecast.attention_seconds == pytest.approx(attention + merge)
    assert forecast.store_seconds == (4 * ROW + 16 * ROW // 2) / 2000
    hidden = placed("usp", "full", mesh=(2, 2))
    part = (attention + 2 * 2 + forecast.store_seconds) / 4  # a call for each of two KV heads
    turns = max(4 * part, one + 1 + step / 1000 + part)  # a message for the other head, too
    before = EXCHANGE + MOVED + 2 * one + swap / 1000
    whole = before + turns + one + back / 1000 + merge
    assert hidden.layer_seconds == pytest.approx(whole)


def test_a_gather_hides_behind_other_kv_heads():
    sums = placed("gather", placement="replicated")
    hidden = placed("gather", "full", placement="replicated")
    part = EXCHANGE + 12 * ROW / 4 / 1000
    attention = (2 + PAIRS * 16 * PAIR + 3 * 2 + sums.store_seconds) / 4  # four calls
    in_parts = EXCHANGE + part + 3 * max(part, attention) + attention
    assert hidden.layer_seconds == pytest.approx(min(in_parts, sums.layer_seconds))
    assert hidden.slowest_gather_seconds == sums.slowest_gather_seconds
    assert sums.hidden_seconds == 0


@given(
    exchange=st.sampled_from(["gather", "ring", "pass_q", "all_to_all"]),
    extend=st.integers(1, 3000),
    cached=st.integers(0, 5000),
    num_hosts=st.integers(1, 9),
    ranks_per_host=st.integers(1, 3),
    gflops=st.floats(1, 1e5),
    gather_gb_per_s=st.floats(0.01, 100),
)
def test_overlap_is_never_longer_and_never_hides_attention(
    exchange, extend, cached, num_hosts, ranks_per_host, gflops, gather_gb_per_s
):
    rates = Rates(gflops=gflops, gather_gb_per_s=gather_gb_per_s)
    ranks = {"cp_size": num_hosts * ranks_per_host, "ranks_per_host": ranks_per_host}
    ways = {"placement": "page_interleave", "exchange": exchange}
    batch, layer = ([extend, 7], [extend + cached, 9]), AttentionLayer(page_size=16)
    sums, hidden, ahead = (
        predict([batch], layer, rates, **ranks, **ways, overlap=overlap)
        for overlap in (False, True, "ahead")
    )
    if exchange != "gather" or num_hosts == 1:  # no cached keys are gathered
        assert ahead.layer_seconds == hidden.layer_seconds
        assert ahead.scratch_bytes == hidden.scratch_bytes
    longest = hidden.slowest_attention_seconds + hidden.store_seconds
    for less, more in ((hidden.layer_seconds, sums.layer_seconds), (longest, hidden.layer_seconds)):
        assert less <= more or less == pytest.approx(more)
    assert hidden.single_rank_seconds == sums.single_rank_seconds
    assert (sums.overlap, hidden.overlap) == ("none", "full")


@pytest.mark.parametrize("overlap", ["none", "full", "ahead"])
@pytest.mark.parametrize(
    ("placement", "taken"), [("replicated", "gather"), ("page_interleave", "pass_q/all_to_all")]
)
def test_auto_is_what_context_parallel_takes_for_each_batch(placement, taken, overlap):
    rates, layer = Rates(gflops=5000, gather_gb_per_s=2), AttentionLayer()
    options = {"cp_size": 8, "placement": placement, "overlap": overlap}
    batches = [([new], [new + cached]) for new, cached in ((32768, 0), (64, 131072), (1, 100))]
    chosen = predict(batches, layer, rates, exchange="auto", **options)
    single = [predict([batch], layer, rates, exchange="auto", **options) for batch in batches]
    assert chosen.layer_seconds == pytest.approx(sum(part.layer_seconds for part in single))
    assert {part.exchange for part in single} == set(chosen.exchange.split("/"))
    assert chosen.exchange == taken
    for exchange, seconds in chosen.alternatives.items():
        found = predict(batches, layer, rates, exchange=exchange, **options)
        assert (found.layer_seconds, found.reason) == (seconds, "")
    for part in single:
        assert part.layer_seconds == part.alternatives[part.exchange]
        faster = min(part.alternatives, key=part.alternatives.get)
        if faster != part.exchange:
            start = f"{part.exchange} by the fewest bytes, though {faster} takes "
            assert part.reason.startswith(start)


def test_what_auto_says_is_what_saves():
    """A gather spends its time on moving keys if there are few queries and many cached keys."""
    rates = Rates(gflops=5000, gather_gb_per_s=1)
    options = {"cp_size": 8, "placement": "page_interleave", "exchange": "auto"}
    chosen = predict([([64], [1 << 17])], AttentionLayer(), rates, **options)
    assert chosen.exchange == "pass_q"
    assert chosen.reason.endswith("less exchange")
    alone = predict([BATCH], LAYER, RATES, cp_size=1, exchange="auto")
    assert (alone.exchange, alone.sent_bytes.tolist()) == ("gather", [0])


def test_hosts_share_memory_within_and_a_wire_between():
    """A row crosses once between two hosts of two ranks, which share the wire of their host."""
    forecast = predict([BATCH], LAYER, RATES, cp_size=4, ranks_per_host=2)
    assert forecast.num_hosts == 2
    assert forecast.sent_bytes.tolist() == [4 * ROW] * 4
    assert forecast.gather_seconds.tolist() == [2 * (3 + 1) + 8 * ROW / 1000] * 4
    assert forecast.store_seconds == 8 * ROW / 2000  # its own rows, and rows of its rail
    assert forecast.pool_bytes == 32 * ROW * 3 // 2  # half of the pool of its host
    together = predict([BATCH], LAYER, RATES, cp_size=4, ranks_per_host=4)
    assert not together.sent_bytes.any()
    assert together.slowest_gather_seconds == 0
    assert together.store_seconds == 4 * ROW / 2000
    assert together.single_rank_seconds == forecast.single_rank_seconds


def test_ranks_that_share_cpus_compute_longer():
    rates = Rates(gflops=100, threads=4, gather_gb_per_s=1, latency_us=100, message_us=10)
    options = {"cp_size": 8, "ranks_per_host": 4}
    batch = [([4096], [4096])]
    free, enough, crowded = (
        predict(batch, AttentionLayer(), rates, cpus=cpus, **options) for cpus in (None, 16, 8)
    )
    assert free.layer_seconds == enough.layer_seconds
    assert crowded.attention_seconds == pytest.approx(2 * free.attention_seconds)
    assert crowded.store_seconds == pytest.approx(2 * free.store_seconds)
    messages = 2 * (100e-6 + 10e-6)
    assert crowded.gather_seconds == pytest.approx(free.gather_seconds + messages)
    assert crowded.single_rank_seconds == pytest.approx(free.single_rank_seconds)  # 4 of 8 CPUs
    alone = predict(batch, AttentionLayer(), rates, cp_size=1, strategy="contiguous", cpus=2)
    assert alone.speedup == pytest.approx(1)
    idle, busy = (
        predict(batch, AttentionLayer(), rates, overlap="full", cpus=cpus, **options)
        for cpus in (17, 16)
    )
    moved = int((busy.sent_bytes + busy.received_bytes).max())
    assert busy.layer_seconds - idle.layer_seconds == pytest.approx(moved / 2.5e9)


def test_cached_keys_a_layer_ahead():
    """Times are by hand: 2 ranks, 68 cached pages of 16, 32 new tokens; 1 byte/ns, 10 us a call."""
    layer = AttentionLayer(page_size=16, num_kv_heads=1, num_heads=8)
    row, latency = layer.kv_row_bytes, 10e-6
    rates = Rates(gflops=2e4, gather_gb_per_s=1.0, latency_us=10, message_us=0, store_gb_per_s=1e9)
    options = {"cp_size": 2, "placement": "page_interleave", "exchange": "gather"}
    of = {
        overlap: predict([([32], [1120])], layer, rates, overlap=overlap, **options)
        for overlap in ("none", "full", "ahead")
    }
    attention = of["none"].slowest_attention_seconds
    cached, new = 544 * row * 1e-9, 16 * row * 1e-9
    assert of["none"].layer_seconds == pytest.approx(2 * latency + cached + new + attention)
    assert of["full"].layer_seconds == pytest.approx(of["none"].layer_seconds)  # one KV head
    assert cached > attention  # the wire is busy all the time
    assert of["ahead"].layer_seconds == pytest.approx(3 * latency + cached + new)
    slow = Rates(gflops=10, gather_gb_per_s=1.0, latency_us=10, message_us=0, store_gb_per_s=1e9)
    hidden = predict([([32], [1120])], layer, slow, overlap="ahead", **options)
    assert hidden.layer_seconds == pytest.approx(
        2 * latency + new + hidden.slowest_attention_seconds
    )
    assert of["full"].scratch_bytes == 1120 * row
    assert of["ahead"].scratch_bytes == (1120 + 1088) * row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overlap": "half"}, "predict: overlap must be a bool, none, full or ahead, got 'half'"),
        ({"exchange": "broadcast"}, "exchange must be one of gather, .*, all_to_all, usp, auto"),
        ({"cpus": 0}, "predict: cpus must be >= 1, got 0"),
        ({"mesh": (2, 3)}, "predict: mesh must have the 4 ranks of cp_size, got 2 x 3"),
        ({"mesh": (4,)}, r"predict: mesh must be \(ring, heads\), two numbers, got \(4,\)"),
        ({"mesh": (0, 4)}, "predict: mesh must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict([BATCH], LAYER, RATES, **({"cp_size": 4} | arguments))


PAGE = (ROOT / "docs" / "how_to" / "placing_keys.md").read_text("utf-8")
CONSOLE = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", PAGE, re.M | re.S)
OUTPUT = re.compile(r'^```text title="Output"\n(.*?)^```$', re.M | re.S)


@pytest.mark.parametrize(("command", "shown"), CONSOLE)
def test_commands_print_what_the_page_shows(command, shown):
    result = invoke(*shlex.split(command)[1:], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_the_prediction_of_the_published_system_is_in_the_table():
    """The page's example prints it, as package/test_package.py checks."""
    (shown,) = OUTPUT.findall(PAGE)
    cells = [line.split("|")[2].strip() for line in PAGE.splitlines() if "new |" in line]
    differences = re.findall(r"pass_q +([-+]\d+) ms", shown)
    assert [cell.replace(",", "").removesuffix(" ms") for cell in cells] == differences
    short, long = re.findall(r"tokens: +([\d.]+) s, ([\d.]+)%", shown)
    assert f"| 1M tokens, 16 hosts | {float(long[0]):.1f} s |" in PAGE
    assert f"| 128K tokens, 16 hosts | {float(short[0]):.1f} s |" in PAGE
    assert f"| {long[1]} % | 93 %" in PAGE
