# SPDX-License-Identifier: Apache-2.0
"""Replays in which each rank holds a share of the pool are right; they hold less, and send more."""

import json
import math
import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from cpattn.context_parallel.placement_name import PlacementName
from cpattn.distributed.transport.terms import TERMS
from cpattn.distributed.transport.versions import own_values
from cpattn.kv import PageInterleave, TokenInterleave
from cpattn.scheduling.request import Request
from cpattn_lab.replay.comparison import SampledRows
from cpattn_lab.replay.driver import replay
from cpattn_lab.replay.records import ReplayReport, ReplicatedRecord
from cpattn_lab.replay.report.summary import (
    check_line,
    figures,
    summarize,
    table_header,
    table_legend,
    table_row,
    write_json,
)
from cpattn_lab.traffic.trace import generate_trace
from support.command_line import QUICK
from support.replay.replay_models import OPTIONS, SMALL, make_report


def run(**changes: Any) -> ReplayReport:
    report = replay(generate_trace(12, seed=1), replace(OPTIONS, **changes))
    assert report.passed
    return report


def shares(report: ReplayReport) -> list[int]:
    """Return how many tokens the pool of each rank holds, its page 0 included."""
    token = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_dim * 4
    assert all(size % token == 0 for size in report.pool_bytes)
    return [size // token for size in report.pool_bytes]


@pytest.mark.slow
def test_each_rank_holds_its_share_and_the_batches_are_the_same():
    whole = run(cp_size=3, pool_tokens=1200)
    assert shares(whole) == [1204] * 3
    assert summarize(whole)["error_over_codes"] is None
    assert "codes" not in check_line(whole)
    for placement, each in (("page_interleave", 404), ("token_interleave:16", 416)):
        report = run(cp_size=3, pool_tokens=1200, placement=placement)
        assert shares(report) == [each] * 3
        assert report.hit_tokens == whole.hit_tokens
        for batch, other in zip(report.batches, whole.batches, strict=True):
            assert batch.new_tokens == other.new_tokens
            assert batch.rank_pairs == other.rank_pairs


# One prompt has 64 tokens over two ranks, no prefix; its rows of K and V are 2 x 2 x 16 float32.
PROMPT = [Request(0, 64 * 64, 1, tuple(range(8)))]
AGREEMENT = 8 * len(TERMS)
VERSIONS = 8 * len(own_values(0))  # ranks compare them before the first exchange


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "attended"),
    [
        # "gather" sends 32 keys; "pass_q" 32 queries, and 32 states of 4 heads, each with an LSE;
        # "all_to_all" 32 queries of the other's 2 heads, 32 keys of its head, and 32 results.
        ("gather", 32 * 256),
        ("pass_q", 32 * 256 + 32 * (256 + 16)),
        ("all_to_all", 32 * 128 + 32 * 128 + 32 * 128),
        ("replicated", 32 * 256),  # every row
    ],
)
def test_bytes_are_those_of_the_exchange(exchange, attended):
    ways = {"placement": "page_interleave", "exchange": exchange}
    is_sharded = exchange != "replicated"
    report = replay(PROMPT, replace(OPTIONS, **(ways if is_sharded else {})))
    assert report.passed
    (batch,) = report.batches
    # A zigzag rank has tokens 0-15 and 48-63, or those between; the other rank owns every second
    # page of them. Rows go to their owners, attention exchanges, hidden states are gathered.
    layer = AGREEMENT + attended + (AGREEMENT + 16 * 256) * is_sharded
    assert batch.rank_sent_bytes == [VERSIONS + 2 * layer + AGREEMENT + 32 * 256] * 2
    assert summarize(report)["exchanges"] == {exchange if is_sharded else "gather": 1}


@pytest.mark.parametrize(
    "text", ["page_interleave", "token_interleave", "token_interleave:3", "token_interleave:32"]
)
def test_a_rank_has_room_for_its_rows(text):
    name = PlacementName.parse(text)
    assert name
    for size, page_size, num_pages in product((1, 2, 3, 4), (1, 4, 16), (1, 2, 3, 7, 24)):
        placement = name.over(size, page_size)
        pages = name.whole_pages(num_pages, size)
        first = size if text == "page_interleave" else 1
        kind = PageInterleave if text == "page_interleave" else TokenInterleave
        assert isinstance(placement, kind)
        assert num_pages - pages < size if text == "page_interleave" else pages == num_pages
        slots = np.arange(first * page_size, (first + pages) * page_size)
        room = (name.rank_pages(pages, size, page_size) + 1) * page_size
        if len(slots):
            assert placement.local_index(slots).max() < room
        turn = max(name.interleave * size, page_size * size)
        assert room <= -(-(pages + first) * page_size // turn) * turn // size + 2 * page_size


@pytest.mark.slow
def test_results_are_those_of_replicated_pools(command_line, tmp_path):
    path = tmp_path / "r.json"
    arguments = ["--requests=6", "--placement=page_interleave", "--dtype=float32"]
    result = command_line.run(*QUICK, *arguments, "--against-replicated", f"--json={path}")
    assert result.returncode == 0, result.stderr
    assert "cpattn replay, replicated: " in result.stderr
    content = json.loads(path.read_text())
    other, summary = content["replicated"], content["summary"]
    assert other["compared_rows"] == content["checked_rows"]
    assert 0 <= other["difference"] <= 2 * content["tolerance"]
    assert other["new_tokens"] == summary["new_tokens"]
    assert other["pool_bytes"] > 1.5 * summary["pool_bytes_per_rank"]
    assert other["sent_bytes"] > 0
    ratio = other["run_seconds"] / summary["run_seconds"]
    assert summary["speedup_over_replicated"] == pytest.approx(ratio)
    assert re.search(r"^replicated +[0-9.]+ s for .* times as long", result.stdout, re.MULTILINE)


def test_rows_are_compared_by_request_and_position():
    rows, other = SampledRows(), SampledRows()
    rows.of = {(0, 1): np.array([1.0, 2.0]), (0, 2): np.array([0.0, 0.0])}
    other.of = {(0, 1): np.array([1.0, 2.5]), (1, 2): np.array([9.0, 9.0])}
    assert rows.difference(other) == (1, 0.5)
    assert rows.difference(SampledRows()) == (0, 0.0)
    other.of[0, 2] = np.array([np.nan, 0.0])
    assert rows.difference(other) == (2, math.inf)


@pytest.mark.parametrize(("difference", "passed"), [(0.03, True), (0.05, False), (math.inf, False)])
def test_rows_unlike_those_of_replicated_pools_are_a_failure(difference, passed, tmp_path):
    report = make_report()
    report.replicated = ReplicatedRecord(3.0, 300, 2**22, 2**28, 2**23, 30, difference)
    assert report.passed is passed
    assert summarize(report)["speedup_over_replicated"] == pytest.approx(2.0)
    (text,) = (text for name, text in figures(report) if name == "replicated")
    assert text.startswith("3.00 s for 300 new tokens: 2.00 times as long; pools of 4.0 MiB")
    write_json(report, tmp_path / "r.json")
    assert float(json.loads((tmp_path / "r.json").read_text())["replicated"]["difference"]) == (
        difference
    )


def test_the_report_says_what_pools_take_and_ranks_send():
    report = make_report(pool_bytes=[3 << 20, 3 << 20])
    report.options = replace(report.options, placement="page_interleave")
    for i, batch in enumerate(report.batches):
        batch.rank_sent_bytes = [1 << 20, 3 << 20]
        batch.exchange = "pass_q" if i else "gather"
    summary = summarize(report)
    assert (summary["pool_bytes"], summary["pool_bytes_per_rank"]) == (6 << 20, 3 << 20)
    assert (summary["sent_bytes"], summary["sent_bytes_per_rank"]) == (12 << 20, 9 << 20)
    assert summary["exchanges"] == {"gather": 1, "pass_q": 2}
    texts = dict(figures(report))
    assert texts["KV pools"] == (
        "3.0 MiB in a rank, which has a share of 32,768 tokens, page_interleave; 6.0 MiB in all"
    )
    assert texts["exchange"] == (
        "12.0 MiB sent by all ranks, 9.0 MiB by the busiest; gather in 1 batch, pass_q in 2 batches"
    )
    header = table_header(report)
    assert table_row(report.batches[0], report)[header.index("exch")] == "4.0"
    assert "attn: with what ranks send for it" in table_legend(report, header)
    assert "zigzag over 2 ranks, page_interleave by auto" in report.options.title
