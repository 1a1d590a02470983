# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/how_to/deployment.md work on two hosts, namespaces with a cable."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.places import ROOT

pytest.importorskip("torch")

from cpattn_lab.check.report import CheckReport
from cpattn_lab.processes.hosts import INTERFACE, Hosts
from support.children import Children, path_with
from support.time_limits import PATIENCE

PAGE = ROOT / "docs" / "how_to" / "deployment.md"
ENVIRONMENT = os.environ | {  # torchrun and the package are found from any folder
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": path_with(),
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.fixture
def start(
    two_hosts: Hosts, tmp_path: Path, children: Children
) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that runs a shell script on a host."""

    def run(host: int, script: str) -> subprocess.Popen[str]:
        command = ["nsenter", f"--net={two_hosts.path(host)}", "sh", "-c", script]
        environment = ENVIRONMENT | {"NODE_RANK": str(host)}
        return children.start(command, cwd=tmp_path, env=environment)

    return run


def documented(word: str) -> str:
    """Return the only block of shell commands of the page with the word."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    return block.rstrip()


def on_two_hosts(hosts: Hosts) -> str:
    return documented("--nnodes 2").replace("192.0.2.1", hosts.address(0))


@pytest.mark.slow
def test_two_hosts_run_the_commands_of_the_page(two_hosts: Hosts, start: Any) -> None:
    script = f"{on_two_hosts(two_hosts)} --tokens 128 --cached 256"
    runs = [start(host, script) for host in range(2)]
    (out, err), (other_out, other_err) = (run.communicate(timeout=PATIENCE) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], err + other_err
    assert other_out == ""
    *lines, flags, times, fastest, verdict = out.splitlines()
    assert verdict.startswith(
        "passed: cp_size 4, zigzag, interleave, contiguous, page_interleave, token_interleave, "
        "gather, ring, pass_q, all_to_all, bfloat16"
    )
    assert re.fullmatch(
        r"a layer of 512 new tokens behind 1024: replicated [\d.]+ ms(, \w+ [\d.]+ ms){4}", times
    )
    assert re.fullmatch(
        r"fastest where pools are shared out: (pass_q|gather|ring|all_to_all)", fastest
    )
    assert [line.split()[:2] for line in lines] == [["rank", str(rank)] for rank in range(4)]
    assert all("threads 1 " in line and "GFLOP/s" in line for line in lines)
    assert re.fullmatch(r"rates:( --[a-z-]+ [-+.e\d]+){7}", flags)
    assert min(two_hosts.received_bytes()) > 1 << 18


@pytest.mark.slow
def test_a_pulled_cable_is_an_error_that_names_the_rank(two_hosts: Hosts, start: Any) -> None:
    patience = 5
    script = on_two_hosts(two_hosts).replace("--nproc-per-node 2", "--nproc-per-node 1")
    runs = [start(host, f"{script} --timeout {patience} --repeats 100000") for host in range(2)]
    deadline = time.monotonic() + PATIENCE
    while two_hosts.received_bytes()[0] < 10 << 20:  # wait until KV is exchanged
        assert time.monotonic() < deadline
        assert [run.poll() for run in runs] == [None, None]
        time.sleep(0.1)
    assert start(1, f"ip link set {INTERFACE} down").wait(PATIENCE) == 0
    for rank, run in enumerate(runs):
        out, err = run.communicate(timeout=PATIENCE)
        assert run.returncode == 1
        assert out == ""
        assert re.search(
            rf"cpattn_lab.check: rank {rank} on \S+: ContextParallel.write_kv.*: "
            rf"rank {1 - rank} of 2 did not answer: .*timed out after {patience} s",
            err,
        )


@pytest.mark.slow
def test_each_rank_binds_itself(tmp_path: Path, children: Children) -> None:
    """The documented command runs with a `cpattn` that records its arguments."""
    shim = tmp_path / "cpattn"
    shim.write_text(f'#!/bin/sh\necho "$* of $LOCAL_WORLD_SIZE" > "{tmp_path}/rank $LOCAL_RANK"\n')
    shim.chmod(0o755)
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PATH']}"}
    run = children.run(["sh", "-c", documented("bind -- python")], cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
    asked = [(tmp_path / f"rank {rank}").read_text() for rank in range(2)]
    assert asked == ["bind -- python -m cpattn_lab.check of 2\n"] * 2


# Successive checks: without torchrun, with one rank, with wrong rows, with a full disk.
CHECKS = """
import os
import sys
import torch
from cpattn.distributed import ContextParallel
from cpattn_lab.check import command as check

def run(*options):
    sys.argv = ["check", "--tokens=16", "--cached=16", *options]
    print("code", check.main(), flush=True)

os.environ.pop("RANK", None)
run()
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
run("--json")
attend = ContextParallel.attend
for change in (torch.nan, 0.1):
    def wrong(self, *arguments, **more):
        out = attend(self, *arguments, **more)
        if self.strategy == "interleave":
            out[-1] += change
        return out
    ContextParallel.attend = wrong
    run()
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.exit(check.main())
"""


def test_what_a_check_says(children: Children) -> None:
    run = children.run([sys.executable, "-c", CHECKS], env=ENVIRONMENT)
    alone, as_json, with_nan, with_more, rest = re.split(r"code \d\n", run.stdout)
    assert re.findall(r"code (\d)", run.stdout) == ["1", "0", "1", "1"], run.stderr
    assert (alone, rest, run.returncode) == ("", "", 1), run.stderr
    without, *_, full = run.stderr.splitlines()
    assert without.startswith("cpattn_lab.check: this process: ")
    assert without.endswith("; start it with torchrun")
    assert full.endswith("this process: writing the result: No space left on device")
    assert "Traceback" not in run.stderr
    assert as_json.count("\n") == 1
    told = json.loads(as_json)
    assert told["passed"] is True
    assert set(told["exchanges"]) == {"replicated", "pass_q", "gather", "ring", "all_to_all"}
    cpus = {int(end) for run in told["ranks"][0]["cpus"].split(",") for end in run.split("-")}
    assert cpus <= os.sched_getaffinity(0)
    for wrong in (with_nan, with_more):
        assert wrong.splitlines()[-1].startswith("FAILED: cp_size 1, ")


RANK: dict[str, Any] = {
    "host": "a", "cpus": "0", "error": 0.0, "attend": 1, "gflops": 1, "write_kv": 1,
    "version": "1.0", "threads": 2, "isa": "avx2",
}  # fmt: skip


def report(ranks: list[dict[str, Any]], **changes: Any) -> CheckReport:
    times = {"replicated": 0.1234, "pass_q": 0.3, "gather": 0.2, "ring": 0.25, "all_to_all": 12.5}
    options = {"tokens": 8, "cached": 16, "dtype": "bfloat16"}
    return CheckReport(**{
        "passed": True, "ranks": ranks, "network": {}, "exchanges": times, "options": options
    } | changes)  # fmt: skip


def test_what_a_report_says() -> None:
    first, *_, times, fastest, verdict = report([RANK, RANK]).lines()
    assert first.startswith("rank 0  a  CPUs 0  threads 2  avx2  error 0.00  attend 1e+03 ms")
    assert times == (
        "a layer of 16 new tokens behind 32: replicated 123 ms, pass_q 300 ms, gather 200 ms, "
        "ring 250 ms, all_to_all 12500 ms"
    )
    assert fastest == "fastest where pools are shared out: gather"
    assert verdict.startswith("passed: cp_size 2, ")
    told = json.loads(report([RANK, RANK | {"error": math.nan}], passed=False).to_json())
    assert (told["passed"], told["fastest"], told["exchanges"]["gather"]) == (False, "gather", 0.2)
    assert [rank["error"] for rank in told["ranks"]] == [0.0, None]
    differ = report([RANK | {"isa": isa} for isa in ("avx2", "avx512")]).lines()
    notes = [line for line in differ if line.startswith("note:")]
    assert notes == ["note: ranks differ in isa: avx2, avx512"]


VALUES = ["0", "-1", "nan", "inf", "1e400", "x", "", str(2**63), "1.5x", "9" * 5000]


OPTIONS = [*product(("--tokens", "--timeout"), VALUES), ("--cached", "0"), ("--repeats", "0")]


@pytest.mark.parametrize(("option", "value"), OPTIONS)
def test_a_number_that_cannot_be_is_named(option: str, value: str, capsys, monkeypatch) -> None:
    from cpattn_lab.check import command as check

    monkeypatch.setattr(sys, "argv", ["check", f"{option}={value}"])
    with pytest.raises(SystemExit, match="2"):
        check.main()
    said = capsys.readouterr().err
    rule = "a number > 0 and <= 1000000" if option == "--timeout" else "an integer > 0 and <="
    assert said.startswith(f"cpattn_lab.check: argument {option}: must be {rule}")
    assert said.endswith(f"got {value[:40]!r}\n")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_while_ranks_are_awaited(children: Children) -> None:
    """A wait within torch would end only with the timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    one_rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    run = children.start([sys.executable, "-m", "cpattn_lab.check"], env=ENVIRONMENT | one_rank)
    progress = "cpattn_lab.check: 1 s: waiting for the other ranks\n"
    assert run.stderr.readline() == progress
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert out == ""
    assert err.removeprefix("cpattn_lab.check: 20 s: waiting for the other ranks\n") == (
        "cpattn_lab.check: this process: interrupted\n"
    )
