# SPDX-License-Identifier: Apache-2.0
"""Sockets and nodes as `cpattn doctor` tells them, by trees of files as Linux has them."""

import pytest

from cpattn.doctor import topology

SECOND = {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.fixture
def two_sockets(tmp_path):
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "sys/devices/system/node/possible": "0-1\n",
        "proc/meminfo": "MemTotal:       67108864 kB\nMemFree:         1234 kB\n",
    }
    for cpu in range(16):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = f"{cpu % 8 // 4}\n"
        files[f"{folder}/thread_siblings_list"] = f"{cpu % 8},{cpu % 8 + 8}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def found(root, usable):
    return {finding.name: finding for finding in topology.findings(root, usable)}


@pytest.mark.parametrize(
    ("usable", "cores", "numa"),
    [
        (set(range(16)), "8 cores of 2 sockets are the 16 CPUs", "2 of 2 nodes: "),
        (set(range(8)), "8 cores of 2 sockets", "2 of 2 nodes: "),
        (SECOND, "4 cores of 1 socket are the 8 CPUs", "node 1 of 2 nodes"),
        ({0, 1, 2, 3}, "4 cores of 1 socket", "node 0 of 2 nodes"),
        ({5}, "1 core of 1 socket", "node 1 of 2 nodes"),
    ],
)
def test_cpus_of_two_sockets(two_sockets, usable, cores, numa):
    says = found(two_sockets, usable)
    shared = "CPUs" in cores
    assert says["cores"].text == cores + ": threads of a call share cores" * shared
    assert says["cores"].state == ("note" if shared else "ok")
    number = cores.split()[0]
    assert says["cores"].hint.startswith(f"export CPATTN_NUM_THREADS={number}," * shared)
    several = numa.startswith("2 of")
    assert says["NUMA"].text == numa + (
        "a call whose threads are on several reads memory of the others" * several
    )
    assert (says["NUMA"].state, bool(says["NUMA"].hint)) == ("note" if several else "ok", several)


@pytest.mark.parametrize(
    ("name", "text", "memory"),
    [
        ("memory.max", "max\n", "64.0 GiB"),
        ("memory.max", "8589934592\n", "8.0 GiB by its cgroup, of 64.0 GiB"),
        ("memory/memory.limit_in_bytes", "536870912\n", "512 MiB by its cgroup, of 64.0 GiB"),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", "64.0 GiB"),
    ],
)
def test_bounds_of_memory(two_sockets, name, text, memory):
    file = two_sockets / "sys/fs/cgroup" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert found(two_sockets, {0})["memory"].text == memory


def test_a_system_that_does_not_say(tmp_path):
    says = found(tmp_path, {0, 1})
    assert {finding.text for finding in says.values()} == {"the system does not say"}
    assert {finding.state for finding in says.values()} == {"ok"}


def test_one_node(tmp_path):
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    assert found(tmp_path, {0, 1})["NUMA"].text == "1 node"
