# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: a process, its output, its exit code, its signals."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")

from click.testing import CliRunner, Result

from children import Children
from cpattn.commands import commands
from cpattn.explain import block_map
from transfer_processes import requires_mooncake

KILLED = rb"Error: rank [01] \(process \d+\) was killed by SIGKILL; all processes ended"
COMMAND = [sys.executable, "-m", "cpattn"]
QUICK = [
    *("replay", "--requests=12", "--scale-lengths=64", "--page-size=4", "--pool-tokens=3000"),
    *("--token-budget=300", "--layers=2", "--hidden-size=64", "--heads=4", "--head-dim=16"),
    "--intermediate-size=96",
]


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = more.pop("env", os.environ) | {"OMP_NUM_THREADS": "1"}  # more would only spin
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=env, **more)


def children_of(pid: int) -> list[int]:
    """Processes whose parent is pid, the dead but unreaped ones too."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def workers_of(pid: int) -> list[int]:
    """The ranks among the children of a replay."""
    ranks = []
    for child in children_of(pid):
        try:
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                ranks.append(child)
        except OSError:
            continue
    return ranks


def start(children: Children, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A replay in a session of its own, and the master of the terminal that is its stderr."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = children.start([*COMMAND, *arguments], stderr=slave, env=environment)
    os.close(slave)
    return process, master


def read_until(master: int, text: bytes, seconds: float = 90) -> bytes:
    """What a process writes to its terminal, up to `text` or its end."""
    seen = b""
    deadline = time.monotonic() + seconds
    while text not in seen and time.monotonic() < deadline:
        try:
            seen += os.read(master, 4096)
        except OSError:  # the other side is closed
            break
    return seen


def test_replay_reports_on_the_terminal_as_json_and_as_html(tmp_path: Path) -> None:
    paths = tmp_path / "r.json", tmp_path / "r.html"
    result = run(*QUICK, "--json", str(paths[0]), "--html", str(paths[1]))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
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


def test_replay_reports_what_a_decode_process_gets(tmp_path: Path) -> None:
    requires_mooncake()
    paths = tmp_path / "r.json", tmp_path / "r.html"
    options = ("--disaggregate", "--pp-size=2", "--cp-size=1", "--decode-tokens=3")
    result = run(*QUICK, *options, "--json", str(paths[0]), "--html", str(paths[1]))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
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
def test_ctrl_c_ends_all_processes_with_one_line(moment: str, children: Children) -> None:
    process, master = start(children, "replay", "--requests", "3000", "--no-check")
    if moment == "run":
        seen = read_until(master, b"batch 0")
        assert b"batch 0" in seen, seen
    else:
        while len(workers_of(process.pid)) < 2:
            time.sleep(0.01)
    workers = workers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output, _ = process.communicate(timeout=30)
    said = read_until(master, b"\0", 5)
    os.close(master)
    assert process.returncode == 130
    assert output == ""
    assert b"Traceback" not in said
    assert said.count(b"interrupted, all processes ended") == 1
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_killed_worker_ends_all_with_one_line(children: Children) -> None:
    process, master = start(children, "replay", "--requests", "3000", "--no-check")
    seen = read_until(master, b"batch 0")
    assert b"batch 0" in seen, seen
    workers = workers_of(process.pid)
    os.kill(max(workers), signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    said = read_until(master, b"\0", 5)
    os.close(master)
    assert process.returncode == 1
    assert output == ""
    assert b"Traceback" not in said
    assert len(re.findall(KILLED, said)) == 1
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments, prog_name="cpattn")


def test_help_teaches() -> None:
    text = invoke("replay", "--help").output
    for word in ("--trace", "--cp-size", "--html", "[default: zigzag]", "cpattn replay --trace"):
        assert word in text
    assert "cpattn replay --model dsa" in text
    assert "explain" in invoke("--help").output


@pytest.mark.parametrize("module", ["model.ModelConfig", "dsa_model.DsaConfig"])
def test_help_tells_the_defaults_of_models(module: str) -> None:
    pytest.importorskip("torch")
    name, _, config = module.partition(".")
    kind = getattr(importlib.import_module(f"cpattn.replay.{name}"), config)
    told = {option.name: option.show_default for option in commands.commands["replay"].params}
    sizes = {f.name: f.default for f in fields(kind) if isinstance(told.get(f.name), str)}
    assert len(sizes) > 5
    for size, default in sizes.items():
        assert re.search(rf"\b{default}\b", told[size]), size


def test_explain_prints_the_block_map() -> None:
    result = invoke("explain", "--lens", "13,40", "--prefix", "0,64", "--cp-size", "4")
    expected = block_map([13, 40], [0, 64], cp_size=4, strategy="zigzag")
    assert result.output.rstrip("\n") == expected.rstrip("\n")
    assert "-1" in invoke("explain", "--lens=-1").output
    assert invoke("explain", "--lens", "8").output.rstrip("\n") == block_map(
        [8], [0], cp_size=2, strategy="zigzag"
    ).rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("explain --lens 1,x", "'1,x' is not a comma-separated list of integers"),
        ("replay --scale-lengths 3", "divisor must divide 512, got 3"),
        ("replay --heads 3", "num_heads must be a multiple of num_kv_heads 2, got 3"),
        ("replay --model dsa --layers 2", "num_layers must be 1, got 2"),
        ("replay --model dsa --kv-heads 2", "--model dsa has no num-kv-heads"),
        ("replay --topk 8", "--model dense has no topk"),
        ("replay --pp-size 5", "pp_size must be at most the 4 layers, got 5"),
        ("replay --decode-tokens 4", "--decode-tokens needs --disaggregate"),
        (
            "replay --disaggregate --model dsa --kv-dtype fp8",
            "decode_tokens must be 0 with FP8 rows, which are in no KV pool",
        ),
        ("replay --disaggregate --decode-tokens 0", "0 is not in the range x>=1"),
        ("replay --page-size 48", "page_size must divide the 64 tokens"),
        ("replay --pool-tokens 64", "tokens, the pool 64"),
        ("replay --trace /nowhere", "'/nowhere' does not exist"),
        ("replay --html /nowhere/r.html", "Directory '/nowhere' does not exist"),
        ("replay --strategy spiral", "'spiral' is not one of"),
    ],
)
def test_a_wrong_argument_is_named(arguments: str, message: str) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert message in result.output


def without(package: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that cannot import `package`."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_a_missing_engine_is_one_line(tmp_path: Path) -> None:
    result = run(*QUICK, "--disaggregate", env=without("mooncake", tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("Error: MooncakeEngine: ")
    assert "install 'mooncake-transfer-engine-non-cuda" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["click", "rich", "torch", "matplotlib"])
def test_a_missing_package_is_one_line(missing: str, tmp_path: Path) -> None:
    html = ["--html", str(tmp_path / "r.html")] if missing == "matplotlib" else []
    result = run(*QUICK, *html, env=without(missing, tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        f"cpattn: {missing} is not installed; pip install 'cpattn[cli]' brings it\n"
    )
