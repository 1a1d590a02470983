# SPDX-License-Identifier: Apache-2.0
"""The command line as users see it: a process, its output, its exit code, its signals."""

import contextlib
import importlib
import json
import os
import re
import signal
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cpattn_terminal.commands import commands
from support.command_line import QUICK, CommandLine, Running, left_of_session, workers_of
from support.transfer.transfer_processes import requires_mooncake

KILLED = rb"Error: rank [01] \(process \d+\) was killed by SIGKILL; all processes ended"
PROGRESS = re.compile(r"cpattn (replay|plan): \d+ s: .*\n")  # a line every ten seconds


def shared_memory() -> set[str]:
    """Return segments of shared memory that no live process of any user maps."""
    segments = {path.name for path in Path("/dev/shm").iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            segments -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return segments


def reported(line: CommandLine, folder: Path, *options: str) -> tuple[str, dict[str, Any], str]:
    paths = folder / "r.json", folder / "r.html"
    result = line.run(*QUICK, *options, "--json", str(paths[0]), "--html", str(paths[1]))
    assert result.returncode == 0, result.stderr
    assert PROGRESS.sub("", result.stderr) == ""
    assert result.stdout.endswith(f"JSON written to {paths[0]}\nreport written to {paths[1]}\n")
    return result.stdout, json.loads(paths[0].read_text()), paths[1].read_text()


def test_replay_reports_on_the_terminal_as_json_and_as_html(command_line, tmp_path):
    text, report, page = reported(command_line, tmp_path)
    for word in ("prefix hits", "throughput", "balance", "torch SDPA", "peak memory", "passed"):
        assert word in text
    summary = report["summary"]
    assert summary["passed"] is True
    assert summary["max_error"] <= summary["tolerance"]
    assert len(report["batches"]) == summary["batches"] > 1
    assert report["options"]["model"]["num_layers"] == 2
    assert page.count("<svg") == 6
    assert "http" not in page.replace("http://www.w3.org", "")
    assert len(page) < 300_000


@pytest.mark.slow
def test_replay_reports_what_a_decode_process_gets(command_line, tmp_path):
    requires_mooncake()
    options = ("--disaggregate", "--pp-size=2", "--cp-size=1", "--decode-tokens=3")
    text, report, page = reported(command_line, tmp_path, *options)
    for word in ("KV transfer", "over 2 link(s)", "second token", "next tokens are those of one"):
        assert word in text
    decode, summary = report["decode"], report["summary"]["decode"]
    assert decode["wrong_tokens"] == 0
    assert len(decode["requests"]) == 12
    assert max(len(request["tokens"]) for request in decode["requests"]) == 3
    assert summary["bytes"] == sum(transfer["num_bytes"] for transfer in decode["transfers"]) > 0
    assert all(seconds > 0 for seconds in summary["seconds_to_second_token"].values())
    assert page.count("<svg") == 7
    assert "MB/s" in page


def wait_for_workers(running: Running) -> list[int]:
    while len(workers := workers_of(running.pid)) < 2:
        assert running.process.poll() is None
        time.sleep(0.01)
    return workers


def wait_for_batch(running: Running) -> list[int]:
    seen = running.read_until(b"batch 0")
    assert b"batch 0" in seen, seen
    return workers_of(running.pid)


def end_of(running: Running, code: int) -> bytes:
    """Return the terminal's text after a command, which must leave no process behind."""
    output, _ = running.process.communicate(timeout=60)
    said = running.read_until(b"\0", 5)
    assert (running.process.returncode, output) == (code, "")
    assert b"Traceback" not in said
    assert left_of_session(running.pid) == []
    return said


LONG = ("replay", "--requests", "3000", "--no-check")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "wait"),
    [
        (LONG, wait_for_workers),
        (LONG, wait_for_batch),
        (("plan", "--calibrate", "--threads=1"), wait_for_workers),  # the exchange has workers
    ],
)
def test_ctrl_c_ends_all_processes_with_one_line(command_line, arguments, wait):
    before = shared_memory()
    running = command_line.start(*arguments, columns=100)
    workers = wait(running)
    running.interrupt()
    said = end_of(running, 130)
    assert said.count(f"cpattn {arguments[0]}: interrupted, all processes ended".encode()) == 1
    assert len(workers) == 2
    assert shared_memory() - before == set()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_leave_nothing_behind(command_line, tmp_path, number):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    running = command_line.start(*LONG, env=env)
    wait_for_workers(running)
    assert list(tmp_path.glob("cpattn-replay-*"))
    running.process.send_signal(number)  # only the command gets it, as from `timeout`
    output, said = running.process.communicate(timeout=60)
    assert (running.process.returncode, output) == (128 + number, "")
    assert PROGRESS.sub("", said) == ""
    assert left_of_session(running.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_worker_ends_all_with_one_line(command_line):
    running = command_line.start(*LONG, columns=100)
    workers = wait_for_batch(running)
    os.kill(max(workers), signal.SIGKILL)
    assert len(re.findall(KILLED, end_of(running, 1))) == 1
    assert len(workers) == 2


@pytest.mark.parametrize("module", ["dense.model.DenseConfig", "dsa.model.DsaConfig"])
def test_help_tells_the_defaults_of_models_and_settings(module):
    from cpattn_lab.replay.command import CHECK_ROWS, DECODE_TOKENS

    name, _, config = module.rpartition(".")
    kind = getattr(importlib.import_module(f"cpattn_lab.replay.{name}"), config)
    told = {option.name: option.show_default for option in commands.commands["replay"].params}
    sizes = {f.name: f.default for f in fields(kind) if isinstance(told.get(f.name), str)}
    assert sizes.pop("kv_dtype") == "bf16"  # the dtype of the models; the help says auto
    assert told["kv_dtype"] == "auto"
    assert len(sizes) > 5
    for size, default in sizes.items():
        assert re.search(rf"\b{default}\b", told[size]), size
    assert (told["check_rows"], told["decode_tokens"]) == (str(CHECK_ROWS), str(DECODE_TOKENS))


def without(package: str, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.slow
def test_a_missing_engine_is_one_line(command_line, tmp_path):
    result = command_line.run(*QUICK, "--disaggregate", env=without("mooncake", tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("Error: MooncakeEngine: ")
    assert "install 'mooncake-transfer-engine-non-cuda" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["click", "rich", "torch", "matplotlib"])
def test_a_missing_package_is_one_line(command_line, missing, tmp_path):
    html = ["--html", str(tmp_path / "r.html")] if missing == "matplotlib" else []
    result = command_line.run(*QUICK, *html, env=without(missing, tmp_path))
    assert result.returncode == 1
    assert result.stderr == f"cpattn: {missing} is not installed: pip install {missing}\n"
