# SPDX-License-Identifier: Apache-2.0
"""`cpattn plan` as a user meets it: the table, the JSON, its options and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result

import cpattn
from cpattn.commands import commands
from cpattn.cost_model import AttentionLayer, Rates, predict
from cpattn.cost_model.command import parse_cp_sizes
from cpattn.cost_model.report import _bytes, _time

RATES = ("--gflops", "900", "--threads", "4")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["plan", *arguments], prog_name="cpattn")


def report(path: Path, *arguments: str) -> dict:
    result = plan(*arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_a_thousand_ranks_from_the_command_line_without_torch(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "cpattn", "plan", "--cp-size", "8..1024"]
    begin = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert time.monotonic() - begin < 30  # on a machine that does other things, too
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if "%" in line]
    sizes = [8, 16, 32, 64, 128, 256, 512, 1024]
    assert [int(row[0]) for row in rows] == sorted(3 * sizes)
    assert {row[1] for row in rows} == {"zigzag", "interleave", "contiguous"}
    assert "assumed: --gflops" in done.stdout
    assert max(map(len, lines)) < 160


def test_json_has_every_rank_as_the_library_predicts_it(tmp_path):
    arguments = ("--cp-size", "4,6", "--extend-lens", "13,40,9", "--prefix-lens", "64,0,7")
    shape = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--dtype", "float32")
    told = report(tmp_path / "plan.json", *arguments, *shape, *RATES, "--gather-gbps", "3")
    rates = Rates(gflops=900, threads=4, gather_gbps=3)
    assert told["rates"] == vars(rates)
    assert told["sources"]["gather_gbps"] == told["sources"]["threads"] == "given"
    assert told["sources"]["store_gbps"] == "assumed"
    layer = AttentionLayer(num_heads=8, num_kv_heads=2, head_dim=64, dtype="float32")
    assert len(told["predictions"]) == 6
    for record in told["predictions"]:
        options = {name: record[name] for name in ("cp_size", "strategy")}
        expected = predict([([13, 40, 9], [64, 0, 7])], layer, rates, **options)
        plans = cpattn.build_cp_metadata_all_ranks([13, 40, 9], [77, 40, 16], **options)
        pairs = [int(p.query_cache_lengths.sum(dtype=np.int64)) for p in plans]
        assert record["pairs"] == pairs
        assert record["imbalance"] == pytest.approx(max(pairs) / np.mean(pairs))
        assert record["sent_bytes"] == expected.sent_bytes.tolist()
        assert record["attention_seconds"] == expected.attention_seconds.tolist()
        for name in ("layer_seconds", "model_seconds", "speedup", "efficiency"):
            assert record[name] == getattr(expected, name)


def test_tokens_and_prefix_are_a_batch_of_one(tmp_path):
    short = report(tmp_path / "a.json", "--cp-size=2", "--tokens=100", "--prefix=7", *RATES)
    batch = ("--extend-lens=100", "--prefix-lens=7")
    assert short == report(tmp_path / "b.json", "--cp-size=2", *batch, *RATES)


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
    measured = Rates(gflops=123, threads=3, call_us=11, gather_gbps=7)
    with mock.patch("cpattn.cost_model.command.calibrate", return_value=measured) as calibrate:
        result = plan("--calibrate", "--cp-size=2", "--gather-gbps=9", "--threads=3", "--heads=16")
    assert result.exit_code == 0, result.output
    assert calibrate.call_args.args[0].num_heads == 16
    assert calibrate.call_args.kwargs["threads"] == 3
    assert "measured: --gflops 123 --pack-rows 24" in result.output
    assert "given: --threads 3 --gather-gbps 9" in result.output


def test_rates_are_measured(monkeypatch):
    """For real, on a small layer."""
    pytest.importorskip("torch")
    from cpattn.cost_model import calibration

    monkeypatch.setattr(calibration, "_LONGEST_CALL", 0.002)
    told: list[str] = []
    layer = AttentionLayer(num_heads=4, num_kv_heads=1, head_dim=64, page_size=16)
    rates = calibration.calibrate(layer, threads=2, progress=told.append)
    assert rates.threads == 2
    assert rates.gflops > 0.1
    assert rates.gather_gbps > 0
    assert rates.store_gbps > 0
    assert told[-1] == "exchange between two processes"


def test_help_teaches():
    text = plan("--help").output
    for word in (
        "cpattn plan --cp-size 8..1024",
        "--calibrate",
        "80 % of the peak here",
        "[default",
    ):
        assert word in text


def test_help_fits_a_terminal():
    text = CliRunner().invoke(commands, ["plan", "--help"], terminal_width=80).output
    assert max(map(len, text.splitlines())) <= 80


def test_help_tells_the_defaults_of_rates():
    options = {option.name: option.show_default for option in commands.commands["plan"].params}
    for name, value in vars(Rates(gflops=1)).items():
        if name not in ("gflops", "threads"):
            assert float(options[name]) == value, name


@pytest.mark.parametrize(
    ("cell", "value", "text"),
    [
        (_bytes, 1 << 10, "1.0 KiB"),
        (_bytes, 1023 << 20, "1,023 MiB"),
        (_bytes, 1536 << 30, "1.5 TiB"),
        (_bytes, 2048 << 40, "2,048 TiB"),
        (_time, 999.7e-6, "1,000 µs"),
        (_time, 0.0123, "12.3 ms"),
        (_time, 1234.5, "1,234.50 s"),
    ],
)
def test_numbers_of_the_table_have_no_exponents(cell, value, text):
    assert cell(value) == text


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8..1024", [8 << i for i in range(8)]), ("3..7", [3, 6, 7]), ("5..5", [5]), ("8,4", [8, 4])],
)
def test_numbers_of_ranks(text, sizes):
    assert parse_cp_sizes(text) == sizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cp-size 0", "'0' is no number of ranks >= 1, list like 8,16,48 or range like 8..1024"),
        ("--cp-size 8..4", "'8..4' is no number of ranks"),
        ("--cp-size 1..2..3", "'1..2..3' is no number of ranks"),
        ("--cp-size 0..4", "'0..4' is no number of ranks"),
        ("--tokens 4 --extend-lens 3", "a batch comes from one of --tokens and --prefix, --ext"),
        ("--extend-lens 3,4 --prefix-lens 1", "as many elements as extend_lens, got 1 and 2"),
        ("--requests 9", "--requests and --token-budget are of a --trace, but there is none"),
        ("--prefix-lens 3", "as many elements as extend_lens, got 1 and 0"),
        ("--extend-lens 0", "batches must have new tokens, got none"),
        ("--extend-lens=-1", "extend_lens must be >= 0 and fit into int32, got -1 at index 0"),
        ("--heads 3", "num_heads must be a multiple of num_kv_heads = 8, got 3"),
        ("--gflops -1", "gflops must be positive and finite, got -1.0"),
        ("--trace /nowhere", "'/nowhere' does not exist"),
        ("--json /nowhere/p.json", "Directory '/nowhere' does not exist"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message):
    result = plan(*arguments.split())
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert message in result.output
