# SPDX-License-Identifier: Apache-2.0
"""Hosts of several ranks: one pool on each, and rows that come to each host once."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpattn.distributed.transport.rails import Rails, most_received
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import pools as worker
from support.distributed.hosts import shards
from support.distributed.hosts.layouts import Layout
from support.distributed.prefill_batches import Case

LAYOUTS = {
    "two of two": ((0, 1), (2, 3)),
    "every other rank": ((0, 2), (1, 3)),
    "three and one": ((0, 1, 2), (3,)),
    "three hosts": ((0, 4), (1, 2), (3,)),
}
CASES = [
    Case("one request", (37,), (11,), head_dim=64),
    Case("three", (5, 0, 13), (4, 6, 0), strategy="interleave", dtype=torch.bfloat16),
    Case("values of another width", (1, 9), (7, 0), strategy="contiguous", v_head_dim=16),
    Case("fewer rows than ranks", (2,), (3,), dtype=torch.float16, page_size=1),
    Case("padding tokens in one slot", (9, 4), (0, 5), num_tokens=17),
]


def size_of(layout: Layout) -> int:
    return sum(map(len, layout))


QUICK, SLOW = ("every other rank",), ("two of two", "three and one", "three hosts")


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(LAYOUTS[name], id=name) for name in QUICK),
        *(pytest.param(LAYOUTS[name], id=name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def layout_and_answers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    layout = request.param
    run = (worker.run_cases, layout, CASES)
    return layout, run_world(size_of(layout), folder, *run)


def test_pools_of_all_hosts_have_the_bits_of_private_ones(layout_and_answers):
    for answer in itertools.chain(*layout_and_answers[1]):
        for shared, own in zip(answer["caches"], answer["over tcp"], strict=True):
            assert torch.equal(shared, own)
        assert torch.equal(*answer["out"])
        assert answer["elsewhere"] == 0


def test_attention_that_writes_has_their_bits_too(layout_and_answers):
    for answer in itertools.chain(*layout_and_answers[1]):
        assert answer["attended"] == [[True] * 3] * 2


def test_a_layer_in_rounds_sends_each_head_once(tmp_path):
    layout = LAYOUTS["two of two"]
    for rank, answer in enumerate(run_world(4, tmp_path, worker.run_rounds, layout)):
        assert [peer for peer, _ in answer["rows"]] == [(rank + 2) % 4] * 2
        assert sum(n for _, n in answer["rows"]) == answer["row bytes"]


@pytest.mark.parametrize("lengths", [(64, 0), pytest.param((23, 40), marks=pytest.mark.slow)])
def test_rows_cross_the_wire_once_for_each_pair_of_hosts_as_predicted(tmp_path, lengths):
    """Between hosts of two ranks each, of two and of three hosts."""
    for layout in (((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5))):
        folder = tmp_path / str(len(layout))
        folder.mkdir()
        answers = run_world(size_of(layout), folder, worker.run_bytes, layout, lengths)
        others = len(layout) - 1
        for rank, answer in enumerate(answers):
            told = others * len(layout[0]) * answer["terms"]  # what ranks here agree to, to others
            shared, private = answer["shared"], answer["private"]
            assert shared["sent"] == answer["predicted sent"] + told
            assert shared["received"] == answer["predicted received"] + told
            # Nothing is sent within a host, and rows to the same place on each other host.
            rail = {ranks[rank % 2] for ranks in layout} - {rank}
            assert {peer for peer, _ in shared["by peer"]} == rail
            rows = answer["rows"][rank] * answer["row"]
            assert answer["predicted sent"] == others * rows
            assert private["sent"] == (len(answers) - 1) * rows + told


@pytest.mark.slow
def test_a_batch_without_tokens(tmp_path):
    assert run_world(4, tmp_path, shards.run_nothing, LAYOUTS["two of two"]) == [0] * 4


def test_each_host_has_one_pool(tmp_path):
    layout = LAYOUTS["two of two"]
    answers = run_world(4, tmp_path, worker.run_one_pool, layout)
    for rank, answer in enumerate(answers):
        assert repr(answer["topology"]).startswith(
            "Topology(shm+tcp, because ranks are on 2 hosts, those of each share memory; "
        )
        assert answer["topology"].ranks_of_host == layout
        # Each sees what the first of its own host wrote there, and nothing of the other.
        assert answer["seen"] == 1.0 + 2 * (rank // 2)
        assert (
            answer["memory"]
            == f"SharedMemory(rank {rank} of rank {'0, 1' if rank < 2 else '2, 3'})"
        )
        assert answer["insisting"] == (
            "RuntimeError: ContextParallel: ranks cannot share memory (transport='shm'): ranks "
            "are on 2 hosts, those of each share memory"
        )


def test_hosts_of_one_rank_each_share_nothing(tmp_path):
    layout = ((0,), (1,))
    for answer in run_world(2, tmp_path, worker.run_alone, layout):
        assert answer == ("tcp", "ranks are on 2 hosts", None)


def test_a_host_that_cannot_share_is_told_on_all(tmp_path):
    layout = LAYOUTS["two of two"]
    for topology in run_world(4, tmp_path, worker.run_without_files, layout):
        assert (topology.transport, topology.reason) == (
            "tcp", "rank 3 cannot open the memory of another rank: Permission denied"
        )  # fmt: skip
        assert topology.ranks_of_host == layout


def test_calls_that_are_not_about_pools_agree_over_both_levels(tmp_path):
    """Disagreements, and exchanges of pools that are shared out, as over TCP alone."""
    layout = LAYOUTS["every other rank"]
    for over_gloo, on_hosts in run_world(4, tmp_path, worker.run_disagreements, layout):
        assert {name: told for name, (told, _) in on_hosts.items()} == {
            name: told for name, (told, _) in over_gloo.items()
        }


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
