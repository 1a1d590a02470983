# SPDX-License-Identifier: Apache-2.0
"""Ranks run on hosts, which are network namespaces with cables; none of these stay behind."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpattn_lab.processes import hosts as _hosts
from cpattn_lab.processes.hosts import Hosts, HostsError, enter
from cpattn_lab.replay.driver import replay
from cpattn_lab.replay.report.summary import figures
from cpattn_lab.traffic.trace import generate_trace
from support.command_line import COMMAND, QUICK, workers_of
from support.replay.replay_models import OPTIONS
from support.time_limits import PATIENCE

ON_HOSTS = replace(OPTIONS, cp_size=4, hosts=2)


@pytest.fixture(autouse=True)
def forked_workers() -> None:
    """Fork no workers from a server, as other replays do: here a worker ends with its parent."""


def on_host(path: str, function: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        enter(path)
        function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("two_hosts", [0.1], indirect=True)
def test_a_cable_has_the_rate_that_was_asked_for(two_hosts):
    num_bytes, listening, ended = 4 << 20, threading.Event(), []

    def receive() -> None:
        with socket.socket() as listener:
            listener.bind((two_hosts.address(1), 7000))
            listener.listen()
            listening.set()
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1 << 16):
                    pass
            ended.append(time.perf_counter())

    def send() -> None:
        with socket.create_connection((two_hosts.address(1), 7000), timeout=PATIENCE) as link:
            link.sendall(bytes(num_bytes))

    receiver = on_host(two_hosts.path(1), receive)
    assert listening.wait(PATIENCE)
    begin = time.perf_counter()
    on_host(two_hosts.path(0), send).join()
    receiver.join()
    rate = num_bytes * 8 / (ended[0] - begin)
    assert rate < 0.12e9
    there, here = two_hosts.received_bytes()
    assert here > num_bytes > there


def test_hosts_see_each_other_and_nobody_else(two_hosts):
    names: list[list[str]] = []
    on_host(two_hosts.path(0), lambda: names.append([n for _, n in socket.if_nameindex()])).join()
    assert sorted(names[0])[:1] == ["eth0"]
    assert "lo" in names[0]
    here = {name for _, name in socket.if_nameindex()}
    assert not {"switch", "port0", "port1"} & here


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["replicated", "page_interleave"])
def test_a_replay_over_two_hosts(two_hosts, placement):
    options = replace(ON_HOSTS, placement=placement, link_gbps=1.0)
    report = replay(generate_trace(12, seed=1), options)
    assert report.passed
    assert len(report.link_bytes) == 2
    sent = sum(sum(batch.rank_sent_bytes) for batch in report.batches)
    # A rank sends to three others, and two of these are on the other host.
    assert sum(report.link_bytes) > sent * 0.6
    (line,) = (text for name, text in figures(report) if name == "hosts")
    assert line.startswith("2 network namespaces of 2 ranks, links of 1 Gbit/s; ")
    alone = replay(generate_trace(12, seed=1), replace(options, hosts=1, link_gbps=None))
    assert alone.link_bytes == []
    assert [b.max_error for b in alone.batches] == [b.max_error for b in report.batches]


def namespaces() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_hosts(two_hosts, command_line, number):
    run = command_line.start(*QUICK, "--requests=1000", "--hosts=2", "--no-torch-baseline")
    deadline = time.monotonic() + PATIENCE
    own = os.readlink("/proc/self/ns/net")
    made: set[str] = set()
    while len(made) < 2:
        assert time.monotonic() < deadline
        assert run.process.poll() is None
        time.sleep(0.1)
        for pid in workers_of(run.pid):
            try:
                made.add(os.readlink(f"/proc/{pid}/ns/net"))
            except OSError:
                continue
        made -= {own}
    os.kill(run.pid, number)
    run.process.wait(PATIENCE)
    while made & namespaces():
        assert time.monotonic() < deadline + PATIENCE
        time.sleep(0.1)


def test_what_is_missing_is_said(monkeypatch):
    for missing in ("ip", "tc"):
        monkeypatch.setattr(_hosts, "which", {"ip": "ip", "tc": "tc", missing: None}.get)
        with pytest.raises(HostsError, match=f"hosts need the command {missing}, of iproute2"):
            Hosts(2, link_gbps=1.0).__enter__()
    with pytest.raises(ValueError, match="num_hosts must be from 1 to 64, got 65"):
        Hosts(65)


@pytest.mark.slow
def test_without_the_rights_it_says_which(children):
    """One line names the error before any process starts; it does not fall back to one host."""
    dropped = "-sys_admin,-net_admin"
    bare = ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]
    as_others = bare if os.geteuid() == 0 else []  # they lack these rights anyway
    result = children.run([*as_others, *COMMAND, *QUICK, "--cp-size=2", "--hosts=2"])
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.search(
        r"Error: hosts need (network namespaces, for which a process must be root or have the "
        r"capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN: Operation not permitted|the command ip)",
        result.stderr,
    )
