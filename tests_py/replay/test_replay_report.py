# SPDX-License-Identifier: Apache-2.0
"""Reports of made-up replays show the cases that a good run does not have."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cpattn_lab.replay.records import ReplayReport
from cpattn_lab.replay.report.guide import guide_lines
from cpattn_lab.replay.report.html import write_html
from cpattn_lab.replay.report.summary import imbalance, print_report, summarize, write_json
from support.replay.replay_models import make_report, make_sparse_report


def printed(report: ReplayReport, width: int | None = None) -> str:
    file = io.StringIO()
    terminal = {"width": width, "force_terminal": True, "no_color": True} if width else {}
    print_report(report, "a title", Console(file=file, **terminal))
    return file.getvalue()


def test_the_summary_adds_up():
    assert (imbalance([0, 0]), imbalance([4, 0])) == (1.0, 2.0)
    summary = summarize(make_report())
    assert summary["hit_rate"] == 0.8
    assert summary["unbounded_hit_rate"] == 0.9
    assert summary["new_tokens_per_second"] == pytest.approx(300 / 1.5)
    assert summary["prompt_tokens_per_second"] == pytest.approx(1500 / 1.5)
    assert summary["balance_pairs"] == 1.5
    assert summary["balance_attention_seconds"] == pytest.approx(1.25)
    assert summary["speedup_over_torch"] == pytest.approx(3.0)
    assert summary["gflops_per_second"] == {"attention": pytest.approx(3 / 0.6)}
    assert summary["peak_bytes_per_rank"] == 2**29
    assert summary["max_error"] == 0.01
    assert summary["passed"] is True


def test_a_sparse_model_is_told_by_phase(tmp_path):
    report = make_sparse_report()
    summary = summarize(report)
    assert summary["model"] == "dsa"
    assert summary["attention_seconds"] == pytest.approx(3 * 0.2)
    assert summary["speedup_over_torch"] == pytest.approx(4.0)
    speeds = {"indexer": pytest.approx(40.0), "attention": pytest.approx(100.0)}
    assert summary["gflops_per_second"] == speeds
    text = printed(report)
    assert "sparse attention to 512 keys, bfloat16, fp8 cache" in text
    words = " ".join(text.split())
    assert "indexer 20.0 %, top-k 4.0 %, attention 16.0 %, projections 40.0 %" in words
    assert "of 15,360 keys 12 swapped" in words
    write_html(report, "a title", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 6
    for phase in report.options.model.phases:
        assert f"{phase} " in page


@pytest.mark.parametrize("error", [0.03, math.inf])
def test_a_wrong_result_is_said_everywhere(error, tmp_path):
    report = make_report()
    report.batches[1].max_error = error
    assert not report.passed
    assert "FAILED" in printed(report)
    write_json(report, tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["summary"]["passed"] is False
    assert float(content["batches"][1]["max_error"]) == error
    write_html(report, "a title", tmp_path / "r.html")
    assert "FAILED" in (tmp_path / "r.html").read_text()


def test_what_was_not_asked_for_is_left_out(tmp_path):
    report = make_report(tolerance=None)
    report.options = replace(report.options, torch_baseline=False, check_rows=0)
    for batch in report.batches:
        batch.torch_seconds = batch.torch_difference = batch.max_error = None
    text = printed(report)
    assert "torch" not in text
    assert "not asked for" in text
    assert report.passed
    write_json(report, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["speedup_over_torch"] is None
    write_html(report, "a title", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 4
    assert "A &lt;CPU&gt;" in page


@pytest.mark.parametrize("make", [make_report, make_sparse_report])
def test_the_table_fits_the_terminal(make):
    for width in (60, 80, 120):
        lines = re.sub("\x1b\\[[0-9;]*m", "", printed(make(), width)).splitlines()
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)
    text = printed(make_report(num_batches=100))
    assert "... and 60 more batches" in text
    assert len(text.splitlines()) < 70


@pytest.mark.parametrize("width", [40, 80, None])
def test_the_guide_says_what_was_seen_and_what_comes_next(width):
    lines = guide_lines(make_report(), width)
    assert max(map(len, lines)) <= (width or 100)
    assert [line[:4] for line in lines if line[0] != " "] == ["seen", "why ", "next"]
    text = " ".join(" ".join(lines).split())
    for words in (
        "7 requests went through 2 processes in 3 batches; 80 % of their tokens were in the cache",
        "but for roundings",
        "zigzag gave the busiest rank 1.500 times the mean number of query-key pairs",
        "torch took 3.0 times as long",
        "cpattn replay --strategy contiguous",
    ):
        assert words in text
    assert "--html" in text
    assert "--html" not in " ".join(guide_lines(make_report(), width, has_page=True))
    wrong = make_report()
    wrong.batches[0].max_error = 1.0
    assert "NOT what one process computes" in " ".join(guide_lines(wrong, None))
    assert "Nothing was compared." in " ".join(guide_lines(make_report(tolerance=None), None))
