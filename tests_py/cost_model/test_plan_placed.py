# SPDX-License-Identifier: Apache-2.0
"""`cpattn plan` of keys that are kept and exchanged in other ways, of hosts, and of decoding."""

from __future__ import annotations

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from cpattn.cost_model import AttentionLayer, Rates, predict, predict_decode
from support.cost_model.plan_reports import RATES, plan, report

SHARDED = ("--placement=page_interleave", "--page-size=16", *RATES)


def test_placing_is_told_to_the_library(tmp_path):
    arguments = ("--cp-size=4", "--tokens=700", "--prefix=5000", "--strategy=zigzag", *SHARDED)
    layer, rates = AttentionLayer(page_size=16), Rates(gflops=900, threads=4)
    for exchange in ("gather", "ring", "pass_q", "all_to_all"):
        told = report(tmp_path / "p.json", *arguments, "--exchange", exchange, "--overlap=full")
        ways = {"placement": "page_interleave", "exchange": exchange, "overlap": True}
        expected = predict([([700], [5700])], layer, rates, cp_size=4, **ways)
        (record,) = told["predictions"]
        assert record["exchange"] == exchange
        assert record["sent_bytes"] == expected.sent_bytes.tolist()
        for name in ("layer_seconds", "hidden_seconds", "pool_bytes", "scratch_bytes"):
            assert record[name] == getattr(expected, name)


def test_hosts_times_ranks_are_the_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets
    hosts = ("--hosts=1..4", "--ranks-per-host=3", "--strategy=zigzag", "--cpus=6", *RATES)
    records = report(tmp_path / "h.json", *hosts)["predictions"]
    assert [record["cp_size"] for record in records] == [3, 6, 12]
    assert {record["ranks_per_host"] for record in records} == {3}
    assert not any(records[0]["sent_bytes"])
    text = " ".join(plan(*hosts).output.split())
    assert "keys replicated, 3 ranks share the memory of a host, 6 CPUs a host" in text
    assert "ranks hosts strategy" in text
    alone = report(tmp_path / "a.json", "--hosts=2,4", *RATES)["predictions"]
    assert alone == report(tmp_path / "b.json", "--cp-size=2,4", *RATES)["predictions"]


def test_auto_says_why(tmp_path):
    arguments = ("--cp-size=8", "--tokens=64", "--prefix=131072", "--exchange=auto", *SHARDED)
    output = plan(*arguments).output
    assert "auto, 8 ranks, zigzag: pass_q takes " in output
    records = report(tmp_path / "a.json", *arguments)["predictions"]
    for record in records:
        assert record["exchange"] == "pass_q"
        assert record["alternatives"]["pass_q"] == record["layer_seconds"]
        assert record["reason"] in " ".join(output.split())
        assert set(record["alternatives"]) == {"gather", "ring", "pass_q", "all_to_all"}


def test_ranks_of_a_mesh(tmp_path):
    arguments = ("--mesh=4x2", "--tokens=4096", "--prefix=4096", "--strategy=zigzag", *SHARDED)
    (record,) = report(tmp_path / "m.json", *arguments, "--exchange=usp")["predictions"]
    assert (record["cp_size"], record["mesh"], record["exchange"]) == (8, [4, 2], "usp")
    (auto,) = report(tmp_path / "a.json", *arguments, "--exchange=auto")["predictions"]
    assert auto["alternatives"]["usp"] == record["layer_seconds"]
    output = plan(*arguments, "--exchange=usp").output
    assert "keys page_interleave, a mesh of 4 x 2 ranks" in output


def test_pools_that_are_shared_out_have_a_column(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = plan("--cp-size=8,16", "--strategy=zigzag", "--tokens=131072", *SHARDED).output
    rows = [line for line in text.splitlines() if "zigzag" in line]
    assert "pool/rank" in text
    assert "2 GiB" in rows[0]
    assert "1 GiB" in rows[1]
    assert "KV pool" not in text
    assert "hidden" not in text
    assert "hidden" in plan("--cp-size=8", "--overlap=full", *RATES).output


def test_without_placing_the_table_is_the_one_of_gathers(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    plain = plan("--cp-size=8", *RATES).output
    same = ("--placement=replicated", "--exchange=gather", "--overlap=none", "--ranks-per-host=1")
    assert plan("--hosts=8", *same, *RATES).output == plain
    threads = ("--threads-per-rank=4", "--gflops=900")
    assert plan("--cp-size=8", *threads).output == plain
    columns = (
        "ranks strategy imbalance attention sent/rank gather store layer model speed-up efficiency"
    )
    assert columns in " ".join(plain.split())
    assert "KV pool: 4 GiB on every rank, for the largest batch" in plain


def test_a_step_of_decoding(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets
    arguments = ("--cp-size=4,8", "--decode=3", "--prefix-lens=4000,9,700", "--threads=4")
    told = report(tmp_path / "d.json", *arguments, "--gflops=900")
    for record, size in zip(told["predictions"], (4, 8), strict=True):
        rates = Rates(gflops=900, threads=4)
        step = predict_decode([4001, 10, 701], AttentionLayer(), rates, cp_size=size)
        assert record["keys"] == step.keys.tolist()
        assert record["sent_bytes"] == step.sent_bytes.tolist()
        for name in ("layer_seconds", "model_seconds", "tokens_per_second", "speedup"):
            assert record[name] == getattr(step, name)
    output = " ".join(plan(*arguments).output.split())
    assert "a step of 3 sequences, page_interleave; 32/8 heads" in output
    assert "ranks keys imbalance attention sent/rank transfer layer model tokens/s" in output
    chosen = "--exchange=auto", "--out-heads=all"
    told = report(tmp_path / "h.json", *arguments, *chosen)
    assert {record["exchange"] for record in told["predictions"]} == {"gather"}
    output = " ".join(plan(*arguments, *chosen).output.split())
    assert "a step of 3 sequences, page_interleave, all heads on every rank; 32/8" in output
    assert "ranks exchange keys imbalance" in output
    same = report(tmp_path / "s.json", "--cp-size=4", "--decode=2", "--prefix=99")
    lengths = report(tmp_path / "l.json", "--cp-size=4", "--decode=2", "--prefix-lens=99,99")
    assert same == lengths


@pytest.mark.parametrize("columns", ["60", "80", "120"])
@pytest.mark.parametrize("arguments", ["--exchange=auto --overlap=full", "--decode=9 --prefix=999"])
def test_tables_of_placed_keys_fit_their_columns(columns, arguments):
    placed = ("--hosts=8,256", "--ranks-per-host=4", "--placement=token_interleave")
    lines = plan(*placed, *arguments.split(), env={"COLUMNS": columns}).output.splitlines()
    others = [line for line in lines if not line.startswith("assumed: ")]
    assert not any("…" in line for line in lines)
    assert max(map(len, others)) <= int(columns)
