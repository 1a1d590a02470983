# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a cable between them: namespaces of networks, processes and files in /proc."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from audit import machine
from cpattn._hosts import INTERFACE, Hosts
from support.children import Children, path_with
from support.distributed.hosts import program
from support.time_limits import PATIENCE

pytestmark = pytest.mark.slow

PORT = 29500  # of a network that nobody else is in


@pytest.fixture(autouse=True)
def mounts() -> None:
    if not machine.own_mounts():
        pytest.skip("no mount namespaces here")


# The ranks see the processes of their own host alone, and the name of its boot.
START = """
mount --bind "$BOOT_ID" /proc/sys/kernel/random/boot_id
for k in 0 1; do
    RANK=$((2 * HOST + k)) "$PYTHON" -m support.distributed.hosts.program &
    ranks="$ranks $!"
done
for rank in $ranks; do wait "$rank" || exit 1; done
"""


def test_rows_cross_a_cable_once(two_hosts: Hosts, tmp_path: Path, children: Children) -> None:
    runs = []
    for host in range(2):
        boot = tmp_path / f"boot_id {host}"
        boot.write_text(f"00000000-0000-0000-0000-{host + 1:012}\n")
        command = ["nsenter", f"--net={two_hosts.path(host)}", "unshare", "--mount", "--pid"]
        command += ["--fork", "--kill-child", "--mount-proc", "sh", "-c", START]
        environment = {
            "HOST": str(host), "BOOT_ID": str(boot), "PYTHON": sys.executable, "WORLD_SIZE": "4",
            "MASTER_ADDR": two_hosts.address(0), "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_with(),
        }  # fmt: skip
        runs.append(children.start(command, env=os.environ | environment))
    said = [run.communicate(timeout=PATIENCE) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    lines = [line for out, _ in said for line in out.splitlines() if line.startswith("{")]
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 4
    half = program.TOKENS // 2 * program.ROW_BYTES  # the rows of the other host
    for answer in answers:
        assert answer["topology"].startswith("Topology(shm+tcp, because ranks are on 2 hosts, ")
        assert answer["ranks of host"] == [[0, 1], [2, 3]]
        assert answer["same"] == [True, True]
        assert answer["written"]
        shared, private = (arrived / half for arrived in answer["arrived"])
        assert 1 < shared < 1.2
        assert 2 < private < 2.4
