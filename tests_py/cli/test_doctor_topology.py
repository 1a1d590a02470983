# SPDX-License-Identifier: Apache-2.0
"""`cpattn doctor` finds sockets and nodes in trees of files like those of Linux."""

import os
import sys
from pathlib import Path

import pytest

from cpattn import _numa
from cpattn.doctor import binding, topology

SECOND = {4, 5, 6, 7, 12, 13, 14, 15}


def write_tree(root, node_cpus, cores_of_socket, num_cores):
    """Write Linux's files about cores: core c has the CPUs c and c + `num_cores`."""
    files = {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree:         1234 kB\n"}
    files["sys/devices/system/node/possible"] = f"0-{len(node_cpus) - 1}\n"
    for node, cpus in enumerate(node_cpus):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{cpus}\n"
    for cpu in range(2 * num_cores):
        folder, core = f"sys/devices/system/cpu/cpu{cpu}/topology", cpu % num_cores
        files[f"{folder}/physical_package_id"] = f"{core // cores_of_socket}\n"
        files[f"{folder}/thread_siblings_list"] = f"{core},{core + num_cores}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def two_sockets(tmp_path):
    return write_tree(tmp_path, ["0-3,8-11", "4-7,12-15"], 4, 8)


@pytest.fixture
def many_nodes(tmp_path):
    """Make two sockets of 32 cores in two nodes each, and twelve nodes later one without CPUs."""
    cpus = ["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127", *[""] * 8]
    return write_tree(tmp_path, cpus, 32, 64)


def found(root, usable, **environ):
    return {finding.name: finding for finding in topology.findings(root, usable, environ)}


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


ALL = set(range(128))


@pytest.mark.parametrize(
    ("usable", "num_ranks", "smt", "shares"),
    [
        (ALL, 1, False, [("0,1,2,3", 64, "0-63")]),
        (ALL, 2, False, [("0,1", 32, "0-31"), ("2,3", 32, "32-63")]),
        (ALL, 2, True, [("0,1", 32, "0-31,64-95"), ("2,3", 32, "32-63,96-127")]),
        (ALL - {0, 1, 64}, 4, False, [("0", 15, "2-15,65"), ("1", 16, "16-31"),
                                      ("2", 16, "32-47"), ("3", 16, "48-63")]),
        (set(range(32, 64)), 2, False, [("2", 16, "32-47"), ("3", 16, "48-63")]),
        (set(range(96, 112)), 3, False, [("2", 5, "96-100"), ("2", 5, "101-105"),
                                         ("2", 6, "106-111")]),
    ],
)  # fmt: skip
def test_ranks_have_the_cores_of_their_nodes(many_nodes, usable, num_ranks, smt, shares):
    made = binding.shares(many_nodes, usable, num_ranks, smt=smt)
    told = [(",".join(s.nodes), s.num_cores, _numa.ranges(s.cpus)) for s in made]
    assert told == shares
    line = "|".join(cpus for _, _, cpus in told)
    judged = found(many_nodes, usable, VLLM_CPU_OMP_THREADS_BIND=line)["vLLM ranks"]
    assert judged.state == ("warning" if smt else "ok")


@pytest.mark.parametrize(
    ("usable", "num_ranks", "error"),
    [
        (ALL, 3, "--ranks must be a multiple or a divisor of the 4 NUMA nodes, got 3"),
        ({0, 64, 1}, 3, "--ranks must leave a core for each: node 0 has 2 for 3 of the 3 ranks"),
    ],
)
def test_ranks_that_nodes_have_no_room_for(many_nodes, usable, num_ranks, error):
    with pytest.raises(ValueError, match=f"^{error}$"):
        binding.shares(many_nodes, usable, num_ranks)


def test_where_the_system_tells_no_nodes(tmp_path):
    shares = binding.shares(tmp_path, {3, 4, 5}, 2)
    assert [share.cpus for share in shares] == [(3,), (4, 5)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0-31|32-63", ""),
        ("0-31|31-63", "ranks share CPUs"),
        ("0-15,64-79|32-47", "threads share cores"),
        ("0-63|200", "CPUs 200 are not for this process"),
        ("16-47|48-63", "a rank is on parts of several NUMA nodes"),
        *(
            (text, "a rank has no CPUs, or not as ranges such as 0-31,64-95")
            for text in ("0-31|", "3-1|4", "0|0-99999999999")
        ),
    ],
)
def test_cpus_that_engines_are_told_to_take(tmp_path, text, problem):
    root = write_tree(tmp_path, ["0-31,64-95", "32-63,96-127"], 32, 64)
    line = found(root, ALL, SGLANG_CPU_OMP_THREADS_BIND=text)["sglang ranks"]
    assert line.text == f"2 ranks on CPUs {text}" + f": {problem}" * bool(problem)
    assert line.state == ("warning" if problem else "ok")
    assert "vLLM ranks" not in found(root, ALL, VLLM_CPU_OMP_THREADS_BIND="auto")


def test_a_command_has_the_cores_of_its_rank(command_line):
    program = "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    (share,) = binding.shares(Path("/"), os.sched_getaffinity(0), 1)
    environment = os.environ | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    answer = command_line.run("bind", "--", sys.executable, "-c", program, env=environment)
    assert (answer.stdout, answer.stderr) == (f"{set(share.cpus)} {share.num_cores}\n", "")


@pytest.mark.parametrize(
    ("arguments", "environ", "error"),
    [
        (["--", "true"], {}, "no launcher says which rank this is: start it by one of torchrun,"),
        (["--", "./absent"], {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}, "./absent: No "),
        (["--ranks", "1"], {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "--ranks must be more "),
        (["true", "-x"], {"SLURM_LOCALID": "0"}, "--ranks must be given"),
    ],
)
def test_commands_that_cannot_be_bound(arguments, environ, error, command_line):
    answer = command_line.run("bind", *arguments, env=os.environ | environ)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"Error: {error}")


def test_what_each_rank_would_get(command_line):
    answer = command_line.run("bind", "--ranks", "1")
    (share,) = binding.shares(Path("/"), os.sched_getaffinity(0), 1)
    assert f"export VLLM_CPU_OMP_THREADS_BIND='{_numa.ranges(share.cpus)}'\n" in answer.stdout
