# SPDX-License-Identifier: Apache-2.0
"""Pools that the ranks of a host share, and the division of their memory."""

import itertools
import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from cpattn.distributed.transport import shared_memory
from cpattn.distributed.transport.shared_memory import LARGE_PAGE, split_buffer
from cpattn.kv import MHATokenToKVPool
from cpattn.kv.buffers import BufferShape
from support.distributed import shared_pool_worker as worker
from support.distributed.distributed_worker import run_world


def test_latents_alone(tmp_path):
    for written, latents in run_world(3, tmp_path, worker.run_latents):
        assert torch.equal(written, latents)


def test_no_rank_writes_what_another_still_reads(tmp_path):
    for before, behind in run_world(2, tmp_path, worker.run_slow_reader):
        assert (before, behind) == ([3.0], [5.0])


CALL = "ContextParallel.write_kv: "


def test_caches_that_differ_are_told(tmp_path):
    differs = f"RuntimeError: {CALL}shared memory of rank 1 differs from rank 0; nothing was sent"
    for rank, (layer, private, mixed) in enumerate(run_world(3, tmp_path, worker.run_other_caches)):
        assert layer == private == differs
        own = "both or neither, got only k_cache there"
        refused = f"ValueError: {CALL}k_cache and v_cache must be in shared memory {own}"
        told = f"RuntimeError: {CALL}rank 1 refused its arguments; nothing was sent: {refused}"
        assert mixed == (refused if rank == 1 else told)


def test_a_rank_that_cannot_say_where_it_is_tells_the_others(tmp_path):
    (told, at_last), (error, also) = run_world(2, tmp_path, worker.run_hidden, group_timeout=3)
    assert told == (
        "RuntimeError: ContextParallel.topology: rank 1 refused its arguments; nothing was sent: "
        f"{error}"
    )
    assert error.startswith("FileNotFoundError: ")
    assert at_last == also == "shm"


@pytest.mark.parametrize("memory", ["shm", 1, object()])
def test_a_pool_refuses_what_is_no_memory(memory):
    with pytest.raises(TypeError, match="memory must be a NumaMemory, a SharedMemory or"):
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
        for of_layer in shares:
            assert sum(of_layer) == shape.layer_bytes
            assert max(of_layer) - min(of_layer) <= ranges[0].num_bytes
    taken.sort()
    for (rank, _, end), (other, begin, _) in itertools.pairwise(taken):
        assert rank != other or end <= begin
    for rank, _, end in taken:
        assert end <= offsets[rank]


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        (BufferShape(5000, 4096, 64, "int8"), 316 << 10),  # very many layers
        (BufferShape(2, 1024, 1024, "bfloat16"), 1 << 20),  # one part for each layer and rank
        (BufferShape(32, 1 << 14, 1024, "bfloat16"), LARGE_PAGE),  # eight parts for each
        (BufferShape(32, 1 << 20, 1024, "bfloat16"), 16 << 20),
    ],
)
def test_ranges_are_as_short_as_their_number_allows(shape, num_bytes):
    ranges = split_buffer(shape, 2, [0] * 2)
    assert {r.num_bytes for r in ranges[:-1]} == {num_bytes}
    assert len(ranges) <= 4096


V1, V2 = "memory/x/memory", ("a/memory.max 100", "a/memory.current 70")


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("", [], 5000 * 1024),
        ("0::/a/b\n", ["a/b/memory.max max", "a/b/memory.current 7"], 5000 * 1024),
        ("0::/a/b\n", [*V2], 30),
        ("0::/a\n", [*V2, "a/memory.stat inactive_file 9"], 39),
        ("4:cpu,memory:/x\n0::/\n", [f"{V1}.limit_in_bytes 10", f"{V1}.usage_in_bytes 12"], 0),
    ],
)
def test_available_memory_is_that_of_the_nearest_limit(
    tmp_path, monkeypatch, cgroups, files, expected
):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    (tmp_path / "cgroup").write_text(cgroups)
    for name, _, text in (file.partition(" ") for file in files):
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(shared_memory, "_MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(shared_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(shared_memory, "_CGROUP_ROOT", tmp_path / "groups")
    assert shared_memory.available_bytes() == expected
