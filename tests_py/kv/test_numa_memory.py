# SPDX-License-Identifier: Apache-2.0
"""Pools on chosen NUMA nodes; Linux tells the nodes of their pages."""

import ctypes
import os
import platform
import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cpattn import _numa
from cpattn.kv import MHATokenToKVPool, NumaMemory, numa
from support.pages import blocks_in
from support.places import ROOT

SIZES = {"size": 64, "page_size": 16, "num_layers": 2, "container": "numpy"}
MBIND = {"x86_64": 237, "aarch64": 235}
NODES = sorted(_numa.memory_nodes(Path("/")))
GIB = 2**30


def errno_of_mbind():
    """Return the system's error number for a call that changes nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(MBIND[platform.machine()], *map(ctypes.c_long, (0, 0, 0, 0, 0, 0)))
    return 0 if done == 0 else ctypes.get_errno()


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """Write files of a system with two nodes of 1 GiB, both usable by this process."""
    files = {"proc/self/status": "Name: x\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n"}
    for node in (0, 1):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal:  1048576 kB\nNode {node} MemFree: 7 kB"
        files[f"{folder}/cpulist"] = f"{4 * node}-{4 * node + 3}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(numa, "_ROOT", tmp_path)
    return tmp_path


def mha_pool(memory, **options):
    return MHATokenToKVPool(**SIZES | {"num_kv_heads": 2, "head_dim": 32} | options, memory=memory)


def policy_of(buffer):
    """Return the policy of a buffer's memory, and the nodes of its pages."""
    begin, policy, last = 0, "", []
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        address, name, *parts = line.split()
        if begin < int(address, 16) <= buffer.ctypes.data:  # addresses differ in length
            begin, policy, last = int(address, 16), name, parts
    return policy, {int(part[1:].split("=")[0]) for part in last if part.startswith("N")}


@contextmanager
def as_the_system_allows():
    """Expect an error of the body if the system places no memory."""
    if not errno_of_mbind():
        yield
        return
    with pytest.raises(RuntimeError, match="the system does not place memory on NUMA nodes"):
        yield


@as_the_system_allows()
def test_pages_are_on_the_node():
    pool = mha_pool(NumaMemory(NODES[:1]), num_layers=40, dtype="float32")
    k = np.random.default_rng(0).standard_normal((64, 2, 32), np.float32)
    for layer in range(40):
        pool.set_kv_buffer(layer, np.arange(16, 80), k, k)
        assert np.array_equal(pool.get_key_buffer(layer)[1:].reshape(k.shape), k)
    for buffer in pool.k_buffer, pool.v_buffer:
        assert policy_of(buffer) == (f"bind:{NODES[0]}", {NODES[0]})


@as_the_system_allows()
def test_the_pool_of_the_page():
    blocks = blocks_in(ROOT / "docs" / "how_to" / "deployment.md")
    names = {"MHATokenToKVPool": MHATokenToKVPool, "NumaMemory": NumaMemory}
    names |= {"num_slots": 128, "num_layers": 2, "num_kv_heads": 2, "head_dim": 32}
    exec(next(block.text for block in blocks if "memory=NumaMemory()" in block.text), names)
    assert names["pool"].num_pages == 2


@pytest.mark.parametrize(
    ("cpus", "nodes"), [({1}, (0,)), ({6, 7}, (1,)), ({3, 4}, (0, 1)), ({3, 4, 99}, (0, 1))]
)
def test_nodes_are_those_of_the_cpus(two_nodes, monkeypatch, cpus, nodes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cpus)
    memory = NumaMemory()
    assert memory.nodes == nodes
    assert repr(memory) == f"NumaMemory({list(nodes)})"


def test_a_node_that_the_system_refuses(two_nodes):
    """A node may be removed after this process has read the files."""
    (two_nodes / "proc/self/status").write_text("Mems_allowed_list:\t0,900\n")
    meminfo = two_nodes / "sys/devices/system/node/node900/meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text("Node 900 MemTotal: 1048576 kB\n")
    message = "^MHATokenToKVPool: the system does not place memory on NUMA nodes 900: "
    with pytest.raises(RuntimeError, match=message):
        mha_pool(NumaMemory([900]))


def test_refused_nodes(two_nodes):
    place = "NumaMemory: nodes must be of 0-1, where this process may have memory, got "
    for nodes, got in ([[7], "7"], [[0, 2, 3, -1], "-1,2-3"], [[], "none"]):
        with pytest.raises(ValueError, match=f"^{place}{got}$"):
            NumaMemory(nodes)
    for nodes in ["0"], 3, [0.5]:
        with pytest.raises(TypeError, match=r"^NumaMemory: nodes must "):
            NumaMemory(nodes)


def test_nodes_of_cpus_without_memory(two_nodes, monkeypatch):
    (two_nodes / "proc/self/status").write_text("Mems_allowed_list:\t1\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    with pytest.raises(ValueError, match="must be given, as those of the CPUs have no memory"):
        NumaMemory()
    assert NumaMemory([1]).nodes == (1,)


def test_a_system_without_nodes(two_nodes):
    (two_nodes / "proc/self/status").unlink()
    with pytest.raises(RuntimeError, match=r"^NumaMemory: the system does not tell of NUMA nodes$"):
        NumaMemory()


def test_a_pool_that_is_larger_than_its_nodes(two_nodes):
    half = {"size": 2**18 - 16, "num_layers": 2, "num_kv_heads": 8, "head_dim": 64}  # 512 MiB K
    assert mha_pool(None, **half).nbytes == GIB
    message = "^MHATokenToKVPool: NUMA nodes 1 have 1 GiB, less than 1.5 GiB of a pool$"
    with pytest.raises(MemoryError, match=message):
        mha_pool(NumaMemory([1]), **half | {"num_layers": 3})


REFUSING = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
filters = ctypes.create_string_buffer(bytes.fromhex("{filters}"))
program = ctypes.create_string_buffer(16)
ctypes.c_uint16.from_buffer(program, 0).value = {number}
ctypes.c_void_p.from_buffer(program, 8).value = ctypes.addressof(filters)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    raise SystemExit(os.strerror(ctypes.get_errno()))
from cpattn.kv import MHATokenToKVPool, NumaMemory
try:
    MHATokenToKVPool(size=4, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8,
                     container="numpy", memory=NumaMemory([{node}]))
except RuntimeError as error:
    print(error)
"""


def test_a_container_that_refuses(children):
    """A filter of system calls, as in containers, refuses mbind with EPERM."""
    number = MBIND[platform.machine()]
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
    filters = b"".join(struct.pack("=HBBI", *line) for line in program).hex()
    done = children.python(REFUSING.format(filters=filters, number=len(program), node=NODES[0]))
    assert done.stdout == (
        f"MHATokenToKVPool: the system does not place memory on NUMA nodes {NODES[0]}: Operation "
        "not permitted (containers need the capability SYS_NICE)\n"
    ), done.stderr
