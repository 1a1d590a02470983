# SPDX-License-Identifier: Apache-2.0
"""`cpattn plan` as users see it: the table, the JSON, its options and errors."""

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import cpattn
from cpattn_lab.cost_model import AttentionLayer, Rates, predict, predict_decode
from cpattn_lab.cost_model.command import parse_cp_sizes
from cpattn_lab.cost_model.report import _bytes, _time
from cpattn_lab.rate_options import as_options
from support.children import path_with
from support.command_line import invoke

RATES = ("--gflops", "900", "--threads", "4")
plan = partial(invoke, "plan")


def report(path: Path, *arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_a_thousand_ranks_from_the_command_line_without_torch(command_line, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    env = os.environ | {"PYTHONPATH": path_with(tmp_path)}
    env.pop("COLUMNS", None)  # pytest-xdist sets it
    done = command_line.run("plan", "--cp-size", "8..1024", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if "%" in line]
    assert [int(row[0]) for row in rows] == sorted(3 * [8, 16, 32, 64, 128, 256, 512, 1024])
    assert {row[1] for row in rows} == {"zigzag", "interleave", "contiguous"}
    assert "assumed: --gflops" in done.stdout
    assert max(len(line) for line in lines if not line.startswith("assumed: --")) < 160


def test_json_has_every_rank_as_the_library_predicts_it(tmp_path):
    short = report(tmp_path / "a.json", "--cp-size=2", "--tokens=100", "--prefix=7", *RATES)
    batch = ("--extend-lens=100", "--prefix-lens=7")
    assert short == report(tmp_path / "b.json", "--cp-size=2", *batch, *RATES)
    arguments = ("--cp-size", "4,6", "--extend-lens", "13,40,9", "--prefix-lens", "64,0,7")
    shape = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--dtype", "float32")
    told = report(tmp_path / "plan.json", *arguments, *shape, *RATES, "--gather-gb-per-s", "3")
    rates = Rates(gflops=900, threads=4, gather_gb_per_s=3, store_gb_per_s=16)
    assert told["rates"] == vars(rates)
    assert told["sources"]["gather_gb_per_s"] == told["sources"]["threads"] == "given"
    assert told["sources"]["store_gb_per_s"] == "assumed"
    layer = AttentionLayer(num_heads=8, num_kv_heads=2, head_dim=64, dtype="float32")
    assert len(told["predictions"]) == 6
    for record in told["predictions"]:
        options = {name: record[name] for name in ("cp_size", "strategy")}
        expected = predict([([13, 40, 9], [77, 40, 16])], layer, rates, **options)
        for name in ("pairs", "sent_bytes", "attention_seconds"):
            assert record[name] == getattr(expected, name).tolist()
        for name in ("layer_seconds", "model_seconds", "speedup", "efficiency", "imbalance"):
            assert record[name] == getattr(expected, name)


LATENT = ("--kv-heads=1", "--head-dim=576", "--v-head-dim=512", "--latent", "--window=100")
BIASED = ("--window=100,all", "--bias=bfloat16")


@pytest.mark.parametrize(
    ("sizes", "pairs", "column", "row_bytes", "said"),
    [
        (LATENT, 101_000 - 100 * 101 // 2, "sent_bytes", 1152_000, "window 100, latents"),
        (
            BIASED,
            1000_000 - 899 * 900 // 2,
            "bias_bytes",
            None,
            "window 100 and all, bias bfloat16",
        ),
    ],
)
def test_windows_latents_and_biases_are_of_the_layer(
    sizes, pairs, column, row_bytes, said, tmp_path
):
    told = report(tmp_path / "plan.json", "--cp-size=2", "--tokens=1000", *sizes, *RATES)
    for record in told["predictions"]:
        assert sum(record["pairs"]) == pairs
        assert sum(record[column]) == (row_bytes or pairs * 32 * 2)
    output = " ".join(plan("--cp-size=2", "--tokens=1000", *sizes, *RATES).output.split())
    assert f"32 layers, {said}" in output
    assert ("Bias: " in output) == (sizes is BIASED)
    assert "--window': must be keys before a token's own" in plan("--window=9,x").output


def test_a_trace_is_batches_behind_its_cache(tmp_path):
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1500, "output_length": 1, "hash_ids": [0, 1, 3]},
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = ("--trace", str(trace), "--token-budget", "1300", "--strategy", "zigzag")
    (record,) = report(tmp_path / "t.json", *arguments, "--cp-size=2", *RATES)["predictions"]
    assert record["num_batches"] == 2
    assert record["new_tokens"] == 1300 + 1500 - 1024  # two blocks of 512 are cached by then
    (first,) = report(tmp_path / "f.json", *arguments, "--requests=1", "--cp-size=2", *RATES)[
        "predictions"
    ]
    assert (first["num_batches"], first["new_tokens"]) == (1, 1300)


def test_calibrated_rates_come_with_their_source():
    measured = Rates(gflops=123, threads=3, call_us=11, gather_gb_per_s=7)
    with mock.patch("cpattn_lab.cost_model.command.calibrate", return_value=measured) as calibrate:
        result = plan(
            "--calibrate", "--cp-size=2", "--gather-gb-per-s=9", "--threads=3", "--heads=16"
        )
    assert result.exit_code == 0, result.output
    assert calibrate.call_args.args[0].num_heads == 16
    assert calibrate.call_args.kwargs["threads"] == 3
    assert "measured: --gflops 123 --pack-rows 24" in result.output
    assert "given: --threads 3 --gather-gb-per-s 9" in result.output


@pytest.mark.slow
def test_rates_are_measured(monkeypatch):
    from cpattn_lab.cost_model import calibration

    monkeypatch.setattr(calibration, "_LONGEST_CALL", 0.002)
    told: list[str] = []
    layer = AttentionLayer(num_heads=4, num_kv_heads=1, head_dim=64, page_size=16)
    rates = calibration.calibrate(layer, threads=2, progress=told.append)
    assert rates.threads == 2
    assert rates.gflops > 0.1
    assert rates.gather_gb_per_s > 0
    assert rates.store_gb_per_s > 0
    assert told[-1] == "exchange between two processes"
    assert len(told) == calibration.num_steps(2) == calibration.num_steps(1) + 2


def test_numbers_of_the_table_have_no_exponents():
    sizes = {1 << 10: "1.0 KiB", 1023 << 20: "1,023 MiB", 1536 << 30: "1.5 TiB"}
    sizes |= {2048 << 40: "2,048 TiB"}
    assert {size: _bytes(size) for size in sizes} == sizes
    times = {999.7e-6: "1,000 µs", 0.0123: "12.3 ms", 1234.5: "1,234.50 s"}
    assert {seconds: _time(seconds) for seconds in times} == times


def test_numbers_of_ranks():
    sizes = {"8..1024": [8 << i for i in range(8)], "3..7": [3, 6, 7], "5..5": [5], "8,4": [8, 4]}
    assert {text: parse_cp_sizes(text) for text in sizes} == sizes
    for text in ("", "x", "8..4", "1..2..3", "0..4", "1,2..3", "..", "4.."):
        with pytest.raises(ValueError):  # noqa: PT011 (the option says what is wrong)
            parse_cp_sizes(text)
        assert f"like 8..1024, got {text!r}\n" in plan(f"--cp-size={text}").stderr


def test_the_same_question_has_the_same_answer(tmp_path, monkeypatch):
    """The command measures nothing, so the answer does not depend on the machine or its load."""
    first = report(tmp_path / "a.json", "--cp-size=8..32")
    peaks = mock.Mock(side_effect=AssertionError("measured"))
    monkeypatch.setattr(cpattn._core, "measure_peak", peaks)
    monkeypatch.setattr(cpattn._core, "default_num_threads", lambda: 3)
    assert report(tmp_path / "b.json", "--cp-size=8..32") == first
    assert set(first["sources"].values()) == {"assumed"}
    assert first["rates"] == vars(Rates(gflops=32 * 440, threads=32, store_gb_per_s=40))


@pytest.mark.parametrize(
    ("arguments", "threads", "gflops"),
    [
        ("--threads=4", 4, 4 * 440),
        ("--dtype=float32", 32, 32 * 230),
        ("--dtype=float16 --threads=1", 1, 230),
        ("--gflops=900", 32, 900),
    ],
)
def test_what_is_not_given_is_assumed(tmp_path, arguments, threads, gflops):
    told = report(tmp_path / "p.json", "--cp-size=2", *arguments.split())
    assert (told["rates"]["threads"], told["rates"]["gflops"]) == (threads, gflops)
    for name in ("gflops", "threads"):
        assert told["sources"][name] == ("given" if f"--{name}" in arguments else "assumed")


def test_the_output_says_of_what_rates_are():
    text = " ".join(plan("--cp-size=2").output.split())
    rank = "a rank is 32 threads of an AMD EPYC with AVX512_BF16, 440 GFLOP/s each in bfloat16"
    network = "the network is gloo over 10 Gbit/s"
    assert "assumed: --gflops 14080 --threads 32 --pack-rows 24" in text
    assert f"Assumed, not measured: {rank}; {network}. --calibrate measures this machine." in text
    text = " ".join(plan("--cp-size=2", *RATES).output.split())
    assert f"Assumed, not measured: {network}. " in text
    rates = ("gather-gb-per-s", "latency-us", "message-us", "store-gb-per-s")
    exchange = [f"--{name}=9" for name in (*rates, "exchange-cpu-gb-per-s")]
    text = " ".join(plan("--cp-size=2", *RATES, *exchange).output.split())
    assert "assumed: --pack-rows 24 --row-keys 75 --call-us 6" in text
    assert "Assumed" not in text
    printed = as_options(vars(Rates(gflops=9, threads=3))).split()
    text = " ".join(plan("--cp-size=2", *printed).output.split())
    assert f"given: {' '.join(printed)}" in text
    assert "assumed" not in text.lower()


PLACED = "--hosts=8,256 --ranks-per-host=4 --placement=token_interleave"


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("--cp-size=8,1024 --tokens=16000000", "strategy attention model speed-up"),
        (f"{PLACED} --exchange=auto --overlap=full", "attention model"),
        (f"{PLACED} --decode=9 --prefix=999", "attention model tokens/s"),
    ],
)
def test_tables_fit_their_columns(columns, arguments, kept):
    lines = plan(*arguments.split(), env={"COLUMNS": str(columns)}).stdout.splitlines()
    assert not any("…" in line for line in lines)
    others = [line for line in lines if not line.startswith("assumed: ")]  # users copy that whole
    assert max(map(len, others)) <= columns
    header = set(next(line for line in lines if line.lstrip().startswith("ranks ")).split())
    assert {"ranks", *kept.split()} <= header
    text = " ".join(" ".join(lines).split())
    left_out = re.findall(r"columns have no room for (.*?)]", text)
    assert left_out or columns == 120
    for name in left_out[0].split(", ") if left_out else ():
        assert name not in header
        assert f"; {name}: " not in text


SHARDED = ("--placement=page_interleave", "--page-size=16", *RATES)


def test_placing_is_told_to_the_library(tmp_path):
    arguments = ("--cp-size=4", "--tokens=700", "--prefix=5000", "--strategy=zigzag", *SHARDED)
    layer, rates = AttentionLayer(page_size=16), Rates(gflops=900, threads=4, store_gb_per_s=16)
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
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
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


def test_ranks_of_a_mesh(tmp_path):
    arguments = ("--mesh=4x2", "--tokens=4096", "--prefix=4096", "--strategy=zigzag", *SHARDED)
    (record,) = report(tmp_path / "m.json", *arguments, "--exchange=usp")["predictions"]
    assert (record["cp_size"], record["mesh"], record["exchange"]) == (8, [4, 2], "usp")
    (auto,) = report(tmp_path / "a.json", *arguments, "--exchange=auto")["predictions"]
    assert auto["alternatives"]["usp"] == record["layer_seconds"]
    output = plan(*arguments, "--exchange=usp").output
    assert "keys page_interleave, a mesh of 4 x 2 ranks" in output


def test_a_step_of_decoding(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    arguments = ("--cp-size=4,8", "--decode=3", "--prefix-lens=4000,9,700", "--threads=4")
    told = report(tmp_path / "d.json", *arguments, "--gflops=900")
    for record, size in zip(told["predictions"], (4, 8), strict=True):
        rates = Rates(gflops=900, threads=4, store_gb_per_s=16)
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
    assert same == report(tmp_path / "l.json", "--cp-size=4", "--decode=2", "--prefix-lens=99,99")
