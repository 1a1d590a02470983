# SPDX-License-Identifier: Apache-2.0
"""Meshes of ranks: heads are split along one dimension, keys go round a ring along the other."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpattn.distributed import ContextParallel
from cpattn.distributed.plans.mesh import group_and_mesh
from cpattn_lab.cost_model import exchange_work
from support.distributed import mesh_worker as worker
from support.distributed.answers import assert_layer, assert_prefill
from support.distributed.distributed_worker import run_world
from support.distributed.layer_worker import LAYERS, LayerRun, run_layers
from support.distributed.planning import first_of, plan_of
from support.distributed.prefill_batches import BATCHES, Case
from support.distributed.sharded_worker import PLACEMENTS, Run, equal, run_prefills, run_traffic
from support.pairwise import pairwise
from support.time_limits import PATIENCE

MATRIX = [
    (mesh, Run(case, placement, "usp"))
    for case, mesh, placement in pairwise(BATCHES[2:], [*worker.MESHES], ["pages", "tokens"])
]
LAYER_MATRIX = [
    (mesh, run)
    for name, placement, mesh in pairwise(
        [*LAYERS], [*PLACEMENTS], ["2 x 2", "columns first", "1 x 4"]
    )
    if (run := LayerRun(name, "usp", placement)).is_possible
]
PROGRAMS = {run_prefills: MATRIX, run_layers: LAYER_MATRIX}
# Equivalent exchanges of one dimension.
SAME = {"4 x 1": "ring", "1 x 4": "all_to_all"}


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory):
    """Return a function that gives the answers of a mesh to its runs by a program."""

    @cache
    def answers(mesh, program):
        runs = [run for other, run in PROGRAMS[program] if other == mesh]
        if program is run_prefills and mesh in SAME:
            runs += [replace(run, exchange=SAME[mesh]) for run in runs]
        arguments = (program, runs, partial(worker.make_mesh, mesh))
        return run_world(worker.num_ranks(mesh), tmp_path_factory.mktemp("mesh"), *arguments)

    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "run"), MATRIX, ids=str)
def test_prefill_is_that_of_the_oracle(answers_of, mesh, run):
    answers = answers_of(mesh, run_prefills)
    assert_prefill(answers, run)
    if mesh in SAME:
        whole = answers[0][replace(run, exchange=SAME[mesh])]
        assert equal(answers[0][run]["sharded"], whole["sharded"])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "run"), LAYER_MATRIX, ids=str)
def test_layer_is_that_of_the_oracle(answers_of, mesh, run):
    """Sinks get their weight at the merge."""
    assert_layer(
        answers_of(mesh, run_layers), run, exact=mesh == "1 x 4" and "sinks" not in run.name
    )


@pytest.mark.slow
def test_what_travels_is_what_the_choice_goes_by(tmp_path):
    """The prefix has whole pages on all ranks of the ring, so no rests travel."""
    case = Case("traffic", (13, 51), (115, 77), page_size=16, num_heads=8, num_kv_heads=2)
    make_mesh = partial(worker.make_mesh, "2 x 2")
    answers = [of["usp"] for of in run_world(4, tmp_path, run_traffic, case, ("usp",), make_mesh)]
    received = max(answer["received"][1] for answer in answers)
    assert received == answers[0]["choice"]["usp"]
    assert received < answers[0]["choice"]["ring"]
    for events in (answer["events"] for answer in answers):
        start = events.index("compute") - 1
        assert events[start:][:4] == ["post", "compute", "finish", "compute"]


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("1 x 4", "4 x 1", "2 x 3")]


@pytest.mark.parametrize("name", ["2 x 2", *OTHERS])
def test_bytes_are_those_of_the_cost_model(name, tmp_path):
    """Bytes are equal if every rank of a row has whole blocks of the ring's keys."""
    size, extend, prefix = worker.num_ranks(name), 96, 288
    work = exchange_work(
        [extend], [extend + prefix], cp_size=size, layer=worker.LAYER, placement="page_interleave",
        exchange="usp", mesh=tuple(map(int, name.split(" x "))),
    )  # fmt: skip
    moved = run_world(size, tmp_path, worker.run_layer_bytes, name, extend, prefix)
    sent, received = zip(*moved, strict=True)
    assert work.sent_bytes.tolist() == list(sent)
    assert work.received_bytes.tolist() == list(received)


@pytest.mark.slow
def test_ranks_of_other_meshes_are_told(tmp_path):
    for told, at_last in run_world(4, tmp_path, worker.run_other_mesh):
        assert told.endswith("attend: exchange of rank 3 differs from rank 0; nothing was sent")
        assert at_last


@pytest.mark.slow
def test_a_mesh_may_be_a_part_of_the_world(tmp_path):
    first, outsider, last = run_world(3, tmp_path, worker.run_part_of_the_world)
    assert first == last == (((0, 1),), [0, 2], PATIENCE)
    assert outsider == "ContextParallel: group must be a DeviceMesh that has this rank"


def test_a_mesh_of_one_dimension_is_its_group(world):
    mesh = DeviceMesh("cpu", [0])
    cp = ContextParallel(mesh, page_size=4)
    assert cp.mesh is None
    assert cp.cp_size == 1
    assert cp.group is mesh.get_group()


def test_meshes_of_one_ring_have_one_group_of_all_ranks(world, monkeypatch):
    """A group of all ranks is kept as long as the group of a mesh's first dimension."""
    ring, *others = (dist.new_group([0]) for _ in range(3))
    meshes = [
        DeviceMesh.from_group([ring, heads], "cpu", [[0]], mesh_dim_names=("ring", "heads"))
        for heads in others
    ]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)  # now the mesh is a part of the world
    (first, _), (second, _) = map(group_and_mesh, meshes)
    assert first is second
    assert first is not world


@pytest.mark.parametrize(
    ("ranks", "names", "message"),
    [
        ([[0]], None, "got 2 with the names None"),
        ([[0]], ("dp", "heads"), "got 2 with the names dp, heads"),
        ([[[0]]], ("ring", "heads", "tp"), "got 3 with the names ring, heads, tp"),
    ],
)
def test_other_meshes_are_refused(world, ranks, names, message):
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    with pytest.raises(
        ValueError, match=f"^ContextParallel: group must be a DeviceMesh .*{message}"
    ):
        ContextParallel(mesh, page_size=4)


def test_auto_knows_the_mesh():
    """Eight ranks cannot share 12 heads evenly, but two can: half of the keys for each."""
    layer = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 128}
    cp = first_of(8, mesh=tuple((2 * i, 2 * i + 1) for i in range(4)))
    choice = cp.choose_exchange(plan_of(cp, 8192, 65536), **layer)
    assert choice.exchange == "usp"
    assert f"at most {choice.received_bytes['usp']} bytes" in choice.reason
    merged = 4 * (2 * 1024) * 6 * 128  # a partial result from each of four rows of the mesh
    assert f"usp {3 * merged}" in choice.reason
    layer |= {"num_heads": 33, "num_kv_heads": 3}
    uneven = cp.choose_exchange(plan_of(cp, 4096, 16384), **layer)
    assert uneven.exchange != "usp"
    assert "usp" not in uneven.reason
    assert "usp" in uneven.received_bytes
