# SPDX-License-Identifier: Apache-2.0
"""Hosts of several ranks: one pool on each, and rows that come to each host once."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpattn.distributed.transport.rails import Rails, most_received
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import pools as worker
from support.distributed.hosts.layouts import members_of, size_of
from support.distributed.prefill_batches import Case

SLOW = pytest.mark.slow
TWO, CROSSED = ((0, 1), (2, 3)), ((0, 2), (1, 3))
CASES = [
    Case("one request", (37,), (11,), head_dim=64),
    Case("three", (5, 0, 13), (4, 6, 0), strategy="interleave", dtype=torch.bfloat16),
    Case("values of another width", (1, 9), (7, 0), strategy="contiguous", v_head_dim=16),
    Case("fewer rows than ranks", (2,), (3,), dtype=torch.float16, page_size=1),
    Case("padding tokens in one slot", (9, 4), (0, 5), num_tokens=17),
    Case("physical padding", (9, 15), (3, 5), page_size=16, pad_to_physical=True),
]


@pytest.mark.parametrize(
    "layout",
    [
        ((0, 1, 2),),
        pytest.param(TWO, marks=SLOW),
        CROSSED,
        pytest.param(((0, 1, 2), (3,)), marks=SLOW),
        pytest.param(((0, 4), (1, 2), (3,)), marks=SLOW),
    ],
)
def test_pools_of_all_hosts_have_the_bits_of_private_ones(tmp_path, layout):
    """Attention writes, too; on one host each row is written by one rank, and none is sent."""
    answers = run_world(size_of(layout), tmp_path, worker.run_cases, layout, CASES)
    for case, of_case in zip(CASES, zip(*answers, strict=True), strict=True):
        for answer in of_case:
            assert answer["same"] == [True] * 15, case.name
        if len(layout) == 1:
            written = sorted(itertools.chain(*(answer["slots"] for answer in of_case)))
            assert written == sorted({slot for slot in of_case[0]["all slots"] if slot >= 0})
            assert all(answer["sent"] == [] for answer in of_case)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        (TWO, (64, 0)),
        pytest.param(TWO, (23, 40), marks=SLOW),
        pytest.param((*TWO, (4, 5)), (23, 40), marks=SLOW),
    ],
)
def test_rows_cross_the_wire_once_for_each_pair_of_hosts_as_predicted(tmp_path, layout, lengths):
    """Rows go between two or three hosts of two ranks each."""
    answers = run_world(size_of(layout), tmp_path, worker.run_bytes, layout, lengths)
    others = len(layout) - 1
    for rank, answer in enumerate(answers):
        told = others * len(layout[0]) * answer["terms"]  # terms of ranks here, sent to others
        shared, private = answer["shared"], answer["private"]
        assert shared["sent"] == answer["by attention"] == answer["predicted sent"] + told
        assert shared["received"] == answer["predicted received"] + told
        # Nothing is sent within a host; rows go to the same place on each other host.
        rail = {ranks[rank % 2] for ranks in layout} - {rank}
        assert {peer for peer, _ in shared["by peer"]} == rail
        assert answer["predicted sent"] == others * answer["rows"]
        assert private["sent"] == (len(answers) - 1) * answer["rows"] + told


CANNOT_OPEN = "rank {} cannot open the memory of another rank: Permission denied"
HOSTS = "ranks are on 2 hosts, those of each share memory"


TOPOLOGIES = [
    (((0, 1, 2),), "nobody", "shm", "all ranks share the memory of one host"),
    (((0, 1, 2),), "asked", "tcp", "transport='tcp' was given"),
    (((0, 1, 2),), "namespace", "tcp", "rank 2 is in another PID namespace than rank 0"),
    (((0, 1, 2),), "files", "tcp", CANNOT_OPEN.format(2)),
    (((0, 1, 2),), "blind", "tcp", "rank 2 does not see what the others write"),
    (((0, 1), (2,)), "nobody", "shm+tcp", HOSTS),
    (TWO, "nobody", "shm+tcp", HOSTS),
    (TWO, "files", "tcp", CANNOT_OPEN.format(3)),
    (((0,), (1,)), "nobody", "tcp", "ranks are on 2 hosts"),
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_topology_says_what_was_chosen_and_why(tmp_path, size):
    cases = [case for case in TOPOLOGIES if size_of(case[0]) == size]
    tried = [case[:2] for case in cases]
    for rank, answers in enumerate(run_world(size, tmp_path, worker.run_topologies, tried)):
        for case, answer in zip(cases, answers, strict=True):
            assert_topology(answer, rank, *case)


def assert_topology(answer, rank, layout, apart, transport, reason):
    topology, members = answer["topology"], members_of(layout, rank)
    assert (topology.transport, topology.reason) == (transport, reason)
    assert topology.ranks_of_host == layout
    assert len(topology.hosts) == len(layout)
    assert repr(topology).startswith(f"Topology({transport}, because {reason}; ")
    shared = transport != "tcp"
    # Each rank sees only what the first rank of its own host wrote.
    assert answer["seen"] == [1.0 + (members[0] if shared else rank)]
    of = f"rank {', '.join(map(str, members))}"
    assert answer["memory"] == (f"SharedMemory(rank {rank} of {of})" if shared else "None")
    cannot = f"RuntimeError: ContextParallel: ranks cannot share memory (transport='shm'): {reason}"
    possible = transport == "shm" or apart == "asked"
    assert answer["insisting"] == ("no error" if possible else cannot)


@pytest.mark.parametrize("layout", [((0, 1, 2),), CROSSED])
def test_disagreements_are_told_in_the_same_words_as_over_gloo(tmp_path, layout):
    answers = run_world(size_of(layout), tmp_path, worker.run_disagreements, layout)
    for over_gloo, on_hosts in answers:
        assert on_hosts == over_gloo


@st.composite
def layouts(draw):
    ranks = draw(st.permutations(range(draw(st.integers(2, 9)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks) - 1))))
    parts = itertools.pairwise([0, *cuts, len(ranks)])
    return tuple(tuple(sorted(ranks[begin:end])) for begin, end in parts)


@given(layouts())
def test_rails_bring_every_row_to_every_other_host_once(layout):
    everyone = sorted(itertools.chain(*layout))
    rails = {rank: Rails(layout, rank) for rank in everyone}
    for members in layout:
        arriving = sorted(itertools.chain(*(rails[rank].sources for rank in members)))
        assert arriving == [rank for rank in everyone if rank not in members]
    for rank, one in rails.items():
        assert len(one.destinations) == len(layout) - 1
        assert all(rank in rails[other].sources for other in one.destinations)
        assert all(rank in rails[other].destinations for other in one.sources)
        counts = one.kept_counts([10] * len(everyone))
        assert sum(counts) == 10 * (1 + len(one.sources))
    loads = [len(one.sources) for one in rails.values()]
    assert most_received(layout, [1] * len(everyone)) == max(loads)
    if len(set(map(len, layout))) == 1:
        assert set(loads) == {len(layout) - 1}
