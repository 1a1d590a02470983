# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: a process, its output, its exit code, its signals."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import time
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("click")

from click.testing import CliRunner, Result

from cpattn._cli.program import commands
from cpattn.context_parallel.explain import block_map
from support.command_line import QUICK, CommandLine, left_of_session, workers_of
from support.transfer.transfer_processes import requires_mooncake

KILLED = rb"Error: rank [01] \(process \d+\) was killed by SIGKILL; all processes ended"
PROGRESS = re.compile(r"cpattn (replay|plan): \d+ s: .*\n")  # a line every ten seconds


def shared_memory() -> set[str]:
    """Segments of shared memory, but for those that a live process of any user maps."""
    segments = {path.name for path in Path("/dev/shm").iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            segments -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return segments


def test_replay_reports_on_the_terminal_as_json_and_as_html(
    command_line: CommandLine, tmp_path: Path
) -> None:
    paths = tmp_path / "r.json", tmp_path / "r.html"
    result = command_line.run(*QUICK, "--json", str(paths[0]), "--html", str(paths[1]))
    assert result.returncode == 0, result.stderr
    assert PROGRESS.sub("", result.stderr) == ""
    assert result.stdout.endswith(f"JSON written to {paths[0]}\nreport written to {paths[1]}\n")
    for word in ("prefix hits", "throughput", "balance", "torch SDPA", "peak memory", "passed"):
        assert word in result.stdout
    report = json.loads(paths[0].read_text())
    assert report["summary"]["passed"] is True
    assert report["summary"]["max_error"] <= report["summary"]["tolerance"]
    assert len(report["batches"]) == report["summary"]["batches"] > 1
    assert report["options"]["model"]["num_layers"] == 2
    page = paths[1].read_text()
    assert page.count("<svg") == 6
    assert "http" not in page.replace("http://www.w3.org", "")
    assert len(page) < 300_000


def test_replay_reports_what_a_decode_process_gets(
    command_line: CommandLine, tmp_path: Path
) -> None:
    requires_mooncake()
    paths = tmp_path / "r.json", tmp_path / "r.html"
    options = ("--disaggregate", "--pp-size=2", "--cp-size=1", "--decode-tokens=3")
    result = command_line.run(*QUICK, *options, "--json", str(paths[0]), "--html", str(paths[1]))
    assert result.returncode == 0, result.stderr
    assert PROGRESS.sub("", result.stderr) == ""
    for word in ("KV transfer", "over 2 link(s)", "second token", "next tokens are those of one"):
        assert word in result.stdout
    report = json.loads(paths[0].read_text())
    decode, summary = report["decode"], report["summary"]["decode"]
    assert decode["wrong_tokens"] == 0
    assert len(decode["requests"]) == 12
    assert max(len(request["tokens"]) for request in decode["requests"]) == 3
    assert summary["bytes"] == sum(transfer["num_bytes"] for transfer in decode["transfers"]) > 0
    assert all(seconds > 0 for seconds in summary["seconds_to_second_token"].values())
    page = paths[1].read_text()
    assert page.count("<svg") == 7
    assert "MB/s" in page


@pytest.mark.parametrize("moment", ["start", "run"])
def test_ctrl_c_ends_all_processes_with_one_line(command_line: CommandLine, moment: str) -> None:
    before = shared_memory()
    running = command_line.start("replay", "--requests", "3000", "--no-check", columns=100)
    if moment == "run":
        seen = running.read_until(b"batch 0")
        assert b"batch 0" in seen, seen
    else:
        while len(workers_of(running.pid)) < 2:
            assert running.process.poll() is None
            time.sleep(0.01)
    workers = workers_of(running.pid)
    running.interrupt()
    output, _ = running.process.communicate(timeout=60)
    said = running.read_until(b"\0", 5)
    assert running.process.returncode == 130
    assert output == ""
    assert b"Traceback" not in said
    assert said.count(b"cpattn replay: interrupted, all processes ended") == 1
    assert len(workers) == 2
    assert left_of_session(running.pid) == []
    assert shared_memory() - before == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_leave_nothing_behind(
    command_line: CommandLine, tmp_path: Path, number: signal.Signals
) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    running = command_line.start("replay", "--requests", "3000", "--no-check", env=env)
    while len(workers_of(running.pid)) < 2:
        assert running.process.poll() is None
        time.sleep(0.01)
    assert list(tmp_path.glob("cpattn-replay-*"))
    running.process.send_signal(number)  # to the command alone, as `timeout` does
    output, said = running.process.communicate(timeout=60)
    assert running.process.returncode == 128 + number
    assert output == ""
    assert PROGRESS.sub("", said) == ""
    assert left_of_session(running.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_rates_are_measured(command_line: CommandLine) -> None:
    running = command_line.start("plan", "--calibrate", "--threads=1", columns=100)
    while len(workers_of(running.pid)) < 2:  # of the exchange, which comes last
        assert running.process.poll() is None
        time.sleep(0.01)
    running.interrupt()
    output, _ = running.process.communicate(timeout=60)
    said = running.read_until(b"\0", 5)
    assert running.process.returncode == 130
    assert output == ""
    assert b"Traceback" not in said
    assert said.count(b"cpattn plan: interrupted, all processes ended") == 1
    assert left_of_session(running.pid) == []


def test_a_killed_worker_ends_all_with_one_line(command_line: CommandLine) -> None:
    running = command_line.start("replay", "--requests", "3000", "--no-check", columns=100)
    seen = running.read_until(b"batch 0")
    assert b"batch 0" in seen, seen
    workers = workers_of(running.pid)
    os.kill(max(workers), signal.SIGKILL)
    output, _ = running.process.communicate(timeout=60)
    said = running.read_until(b"\0", 5)
    assert running.process.returncode == 1
    assert output == ""
    assert b"Traceback" not in said
    assert len(re.findall(KILLED, said)) == 1
    assert len(workers) == 2
    assert left_of_session(running.pid) == []


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments, prog_name="cpattn")


def test_help_teaches() -> None:
    text = invoke("replay", "--help").output
    for word in ("--trace", "--cp-size", "--html", "[default: zigzag]", "cpattn replay --trace"):
        assert word in text
    assert "cpattn replay --model dsa" in text
    overview = invoke("--help").output
    assert set(commands.commands) <= set(overview.split())
    assert "..." not in overview.split("Commands:")[1]


@pytest.mark.parametrize("module", ["dense.model.DenseConfig", "dsa.model.DsaConfig"])
def test_help_tells_the_defaults_of_models(module: str) -> None:
    pytest.importorskip("torch")
    name, _, config = module.rpartition(".")
    kind = getattr(importlib.import_module(f"cpattn.replay.{name}"), config)
    told = {option.name: option.show_default for option in commands.commands["replay"].params}
    sizes = {f.name: f.default for f in fields(kind) if isinstance(told.get(f.name), str)}
    assert sizes.pop("kv_dtype") == "bf16"  # the type of the models, which the help calls auto
    assert told["kv_dtype"] == "auto"
    assert len(sizes) > 5
    for size, default in sizes.items():
        assert re.search(rf"\b{default}\b", told[size]), size


def test_help_tells_the_defaults_that_settings_have() -> None:
    pytest.importorskip("torch")
    from cpattn.replay.command import CHECK_ROWS, DECODE_TOKENS

    told = {option.name: option.show_default for option in commands.commands["replay"].params}
    assert (told["check_rows"], told["decode_tokens"]) == (str(CHECK_ROWS), str(DECODE_TOKENS))


def test_explain_prints_the_block_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = invoke("explain", "--lens", "13,40", "--prefix", "0,64", "--cp-size", "4")
    expected = block_map([13, 40], [13, 104], cp_size=4, strategy="zigzag")
    assert result.output.rstrip("\n") == expected.rstrip("\n")
    assert invoke("explain", "--lens", "8").output.rstrip("\n") == block_map(
        [8], [8], cp_size=2, strategy="zigzag"
    ).rstrip("\n")


def without(package: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that cannot import `package`."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_a_missing_engine_is_one_line(command_line: CommandLine, tmp_path: Path) -> None:
    result = command_line.run(*QUICK, "--disaggregate", env=without("mooncake", tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("Error: MooncakeEngine: ")
    assert "install 'mooncake-transfer-engine-non-cuda" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["click", "rich", "torch", "matplotlib"])
def test_a_missing_package_is_one_line(
    command_line: CommandLine, missing: str, tmp_path: Path
) -> None:
    html = ["--html", str(tmp_path / "r.html")] if missing == "matplotlib" else []
    result = command_line.run(*QUICK, *html, env=without(missing, tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        f"cpattn: {missing} is not installed; pip install '.[cli]' in the folder of cpattn's "
        "sources brings it\n"
    )
