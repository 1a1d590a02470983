# SPDX-License-Identifier: Apache-2.0
"""Pools that the ranks of a host share: the bits of pools of each rank, written once."""

from __future__ import annotations

import itertools
import mmap
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cpattn.distributed import ContextParallel, Topology
from cpattn.distributed.transport import shared_memory
from cpattn.distributed.transport.shared_memory import LARGE_PAGE, split_buffer
from cpattn.kv import MHATokenToKVPool
from cpattn.kv.buffers import BufferShape
from support.distributed import shared_pool_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import topology as hosts_topology
from support.distributed.prefill_batches import Case

STRATEGIES = ("zigzag", "interleave", "contiguous")


def random_case(number: int, strategy: str) -> Case:
    rng = random.Random(number)
    requests = rng.randrange(1, 5)
    extends = tuple(rng.choice([0, 1, rng.randrange(30)]) for _ in range(requests))
    prefixes = tuple(rng.choice([0, rng.randrange(20)]) for _ in range(requests))
    if sum(extends) + sum(prefixes) == 0:
        extends = (7, *extends[1:])
    padded = rng.random() < 0.3
    return Case(
        f"{strategy}: random {number}",
        extends,
        prefixes,
        strategy=strategy,
        page_size=rng.choice([1, 4, 16]),
        dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        num_kv_heads=rng.choice([1, 2]),
        v_head_dim=rng.choice([32, 16]),
        num_tokens=sum(extends) + rng.randrange(1, 9) if padded else None,
        pad_to_physical=not padded and rng.random() < 0.3,
    )


CASES = [random_case(number, strategy) for number in range(8) for strategy in STRATEGIES]


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("shared"), worker.run_cases, CASES)


def test_pools_have_the_bits_of_those_written_over_tcp(answers):
    for answer in itertools.chain(*answers):
        for shared, own in zip(answer["caches"], answer["over tcp"], strict=True):
            assert torch.equal(shared, own)
        assert torch.equal(*answer["out"])
        assert answer["elsewhere"] == 0


def test_every_row_is_written_by_one_rank_and_nothing_is_sent(answers):
    for of_case in zip(*answers, strict=True):
        written = sorted(itertools.chain(*(answer["slots"] for answer in of_case)))
        assert written == sorted({slot for slot in of_case[0]["all_slots"] if slot >= 0})
        assert all(answer["sent"] == [] for answer in of_case)


def test_latents_alone(tmp_path):
    for written, latents in run_world(3, tmp_path, worker.run_latents):
        assert torch.equal(written, latents)


def test_two_groups_do_not_meet_each_other(tmp_path):
    last = 199 % 7
    rows = run_world(4, tmp_path, worker.run_two_groups)
    assert rows == [[float(last)] * 11] * 2 + [[10.0 + last] * 11] * 2


def test_no_rank_writes_what_another_still_reads(tmp_path):
    for before, behind in run_world(2, tmp_path, worker.run_slow_reader):
        assert (before, behind) == ([3.0], [5.0])


@pytest.mark.parametrize(
    ("apart", "transport", "reason"),
    [
        ("nobody", "shm", "all ranks share the memory of one host"),
        ("asked", "tcp", "transport='tcp' was given"),
        ("host", "shm+tcp", "ranks are on 2 hosts, those of each share memory"),
        ("namespace", "tcp", "rank 2 is in another PID namespace than rank 0"),
        ("files", "tcp", "rank 2 cannot open the memory of another rank: Permission denied"),
        ("blind", "tcp", "rank 2 does not see what the others write"),
    ],
)
def test_topology_says_what_was_chosen_and_why(tmp_path, apart, transport, reason):
    for answer in run_world(3, tmp_path, hosts_topology.run_topology, tmp_path, apart):
        topology = answer["topology"]
        assert (topology.transport, topology.reason) == (transport, reason)
        on_one = apart != "host"
        assert topology.ranks_of_host == (((0, 1, 2),) if on_one else ((0, 1), (2,)))
        assert len(topology.hosts) == len(topology.ranks_of_host)
        assert answer["shared"] == (transport != "tcp")
        assert answer["written"]
        if apart in ("nobody", "asked"):
            assert answer["insisting"] == "no error"
        else:
            assert answer["insisting"] == (
                f"ContextParallel: ranks cannot share memory (transport='shm'): {reason}"
            )


def test_topology_is_readable():
    one = Topology("shm", ("a",), ((0,),), "so it is")
    assert repr(one) == "Topology(shm, because so it is; a: rank 0)"


def test_an_unknown_transport_is_refused(request):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    with pytest.raises(ValueError, match="transport must be auto, tcp, shm, got 'rdma'"):
        ContextParallel(dist.group.WORLD, page_size=4, transport="rdma")


@pytest.mark.parametrize("memory", ["shm", 1, object()])
def test_a_pool_refuses_what_is_no_memory(memory):
    with pytest.raises(TypeError, match="memory must be a SharedMemory or None, got"):
        MHATokenToKVPool(
            size=4, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, memory=memory
        )


@given(
    shapes=st.lists(
        st.builds(
            BufferShape,
            st.integers(1, 70),
            st.integers(1, 5000),
            st.integers(1, 3000),
            st.sampled_from(["float32", "bfloat16", "int8"]),
        ),
        min_size=1,
        max_size=3,
    ),
    num_ranks=st.integers(1, 9),
)
def test_ranges_cover_a_buffer_and_share_it_evenly(shapes, num_ranks):
    offsets = [0] * num_ranks
    taken = []
    for shape in shapes:
        ranges = split_buffer(shape, num_ranks, offsets)
        end, shares = 0, [[0] * num_ranks for _ in range(shape.num_layers)]
        for rank, offset, num_bytes in ranges:
            assert num_bytes > 0
            assert num_bytes % mmap.PAGESIZE == offset % mmap.PAGESIZE == 0
            taken.append((rank, offset, offset + num_bytes))
            for layer in range(shape.num_layers):
                first = layer * shape.layer_bytes
                both = min(end + num_bytes, first + shape.layer_bytes) - max(end, first)
                shares[layer][rank] += max(0, both)
            end += num_bytes
        assert 0 <= end - shape.num_bytes < LARGE_PAGE
        large = shape.num_bytes >= 2 * LARGE_PAGE * shape.num_layers * num_ranks
        grain = LARGE_PAGE if large else mmap.PAGESIZE
        for of_layer in shares:
            assert sum(of_layer) == shape.layer_bytes
            assert max(of_layer) - min(of_layer) <= 2 * grain + 1
    taken.sort()
    for (rank, _, end), (other, begin, _) in itertools.pairwise(taken):
        assert rank != other or end <= begin
    for rank, _, end in taken:
        assert end <= offsets[rank]


def test_ranges_of_very_many_layers_are_few():
    ranges = split_buffer(BufferShape(5000, 4096, 64, "int8"), 4, [0] * 4)
    assert len(ranges) <= 4096


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("", {}, 5000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "7"}, 5000 * 1024),
        ("0::/a/b\n", {"a/memory.max": "100", "a/memory.current": "70"}, 30),
        (
            "0::/a\n",
            {"a/memory.max": "100", "a/memory.current": "70", "a/memory.stat": "inactive_file 9"},
            39,
        ),
        (
            "4:cpu,memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "10", "memory/x/memory.usage_in_bytes": "12"},
            0,
        ),
    ],
)
def test_available_memory_is_that_of_the_nearest_limit(
    tmp_path, monkeypatch, cgroups, files, expected
):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    (tmp_path / "cgroup").write_text(cgroups)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(shared_memory, "_MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(shared_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(shared_memory, "_CGROUP_ROOT", tmp_path / "groups")
    assert shared_memory.available_bytes() == expected
