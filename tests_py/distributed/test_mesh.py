# SPDX-License-Identifier: Apache-2.0
"""Heads along one dimension of a mesh of ranks, keys round a ring along the other."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import cpattn
from cpattn.cost_model import AttentionLayer, exchange_work
from cpattn.distributed import ContextParallel
from support.cases import assert_attention
from support.distributed import mesh_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.layer_cases import LAYER_NAMES, decoded, layer_inputs
from support.distributed.prefill_batches import Case, expected_of
from support.distributed.sharded_worker import PLACEMENTS, Run
from support.time_limits import PATIENCE
from support.tolerances import assert_attended

BATCHES = [
    Case("different prefixes", (13, 40, 9), (64, 0, 7)),
    Case("long prefix", (5,), (700,), page_size=16, num_heads=8, num_kv_heads=4),
    Case("decode and prefill", (1, 1, 1, 30, 18, 2), (9, 33, 1, 0, 12, 3)),
    Case("fewer tokens than ranks", (1,), (6,)),
    Case("nothing new", (0, 0), (8, 3)),
    Case("padding tokens", (9, 6), (3, 5), num_tokens=22),
    Case("physical padding", (9, 15), (3, 5), pad_to_physical=True),
    Case("bfloat16", (21, 90), (60, 0), dtype=torch.bfloat16),
    Case("one KV head", (21, 18), (6, 0), head_dim=48, num_kv_heads=1),
    Case("heads for no number of ranks", (21, 18), (6, 0), num_heads=7, num_kv_heads=7),
    Case("fewer heads than ranks", (21, 18), (6, 0), num_heads=1, num_kv_heads=1),
]
EXCHANGES = ("usp", "ring", "all_to_all")
RUNS = [
    Run(case, placement, exchange)
    for case in BATCHES
    for placement in ("pages", "tokens")
    for exchange in EXCHANGES
]
BY_MESH = [run for run in RUNS if run.exchange == "usp"]


@pytest.fixture(scope="module", params=worker.MESHES)
def prefills(request, tmp_path_factory):
    name = request.param
    path = tmp_path_factory.mktemp("mesh")
    return name, run_world(worker.num_ranks(name), path, worker.run_prefills, name, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("run", BY_MESH, ids=str)
def test_prefill_is_that_of_the_oracle(prefills, run):
    name, answers = prefills
    dtype = str(run.case.dtype).removeprefix("torch.")
    mine, *others = (answer[str(run)] for answer in answers)
    assert_attended(mine["out"], mine["lse"], expected_of(run.case), dtype, op="ring of ranks")
    assert mine["out"].dtype == run.case.dtype
    for other in others:
        assert torch.equal(other["out"], mine["out"])
        assert torch.equal(other["lse"], mine["lse"])
    for answer in answers:
        assert not answer[str(run)]["padding"].any()
    same = {"4 x 1": "ring", "1 x 4": "all_to_all"}.get(name)
    if same:
        whole = answers[0][str(replace(run, exchange=same))]
        assert torch.equal(mine["out"], whole["out"])
        assert torch.equal(mine["lse"], whole["lse"])


@pytest.fixture(scope="module", params=["2 x 2", "columns first", "1 x 4"])
def layer_answers(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("layers")
    return request.param, run_world(4, path, worker.run_layers, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", [name for name in LAYER_NAMES if "of tokens" not in name])
def test_layer_is_that_of_the_oracle(layer_answers, placement, name):
    mesh, answers = layer_answers
    for answer in answers:
        out, lse = answer[f"usp, {placement}, {name}"]
        inputs = layer_inputs(name)
        assert_attention(out, lse, decoded(inputs), op="ring of ranks")
        if mesh == "1 x 4" and "sinks" not in inputs:  # which take their weight at the merge
            expected = cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True)
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])


@pytest.mark.slow
def test_what_travels_is_what_the_choice_goes_by(tmp_path):
    """A prefix of whole pages of the ring, so that no rests travel."""
    case = Case("traffic", (13, 51), (115, 77), page_size=16, num_heads=8, num_kv_heads=2)
    answers = run_world(4, tmp_path, worker.run_received, case)
    received = max(answer[0] for answer in answers)
    assert received == answers[0][1]["usp"]
    assert received < answers[0][1]["ring"]
    for _, _, events in answers:
        start = events.index("compute") - 1
        assert events[start:][:4] == ["post", "compute", "finish", "compute"]


@pytest.mark.parametrize(
    ("name", "mesh"), [("2 x 2", (2, 2)), ("1 x 4", (1, 4)), ("4 x 1", (4, 1)), ("2 x 3", (2, 3))]
)
def test_bytes_are_those_of_the_cost_model(name, mesh, tmp_path):
    """Where every rank of a row holds whole blocks of what goes round, which are of 16 tokens."""
    size, extend, prefix = worker.num_ranks(name), 96, 288
    layer = AttentionLayer(
        num_heads=worker.LAYER_HEADS, num_kv_heads=worker.LAYER_KV_HEADS,
        head_dim=worker.LAYER_DIM, dtype="float32", page_size=16,
    )  # fmt: skip
    work = exchange_work(
        [extend], [extend + prefix], cp_size=size, layer=layer, placement="page_interleave",
        exchange="usp", mesh=mesh,
    )  # fmt: skip
    moved = run_world(size, tmp_path, worker.run_layer_bytes, name, extend, prefix)
    sent, received = zip(*moved, strict=True)
    assert work.sent_bytes.tolist() == list(sent)
    assert work.received_bytes.tolist() == list(received)


@pytest.mark.slow
def test_ranks_of_other_meshes_are_told(tmp_path):
    case = Case("small", (5, 13), (4, 0))
    for told in run_world(4, tmp_path, worker.run_other_meshes, case):
        assert (
            "attend: exchange of rank 3 differs from rank 0; nothing was sent"
            in (told["other mesh"])
        )
        assert told["at last"] == "True"


@pytest.mark.slow
def test_lost_rank_is_named(tmp_path):
    *others, _ = run_world(4, tmp_path, worker.run_loss, group_timeout=4)
    for message in others:
        assert message.startswith("ContextParallel.attend: ")
        assert "of 4 did not answer" in message
    assert any("rank 3 of 4" in message for message in others)


@pytest.mark.slow
def test_a_mesh_may_be_a_part_of_the_world(tmp_path):
    case = Case("small", (5, 13), (4, 0))
    first, outsider, last = run_world(3, tmp_path, worker.run_part_of_the_world, case)
    assert first == last == (((0, 1),), [0, 2], PATIENCE)
    assert outsider == "ContextParallel: group must be a DeviceMesh that has this rank"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=1))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_mesh_of_one_dimension_is_its_group(world):
    mesh = DeviceMesh("cpu", [0])
    cp = ContextParallel(mesh, page_size=4)
    assert cp.mesh is None
    assert cp.cp_size == 1
    assert cp.group is mesh.get_group()


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


def test_usp_needs_a_mesh(world):
    with pytest.raises(ValueError, match="exchange 'usp' needs a DeviceMesh with the dimensions"):
        ContextParallel(world, page_size=4, exchange="usp")


class Elsewhere:
    """A rank of 8 in a mesh of 4 x 2 without a group, which planning needs none of."""

    @staticmethod
    def choice(extend, prefix, **layer):
        cp = object.__new__(ContextParallel)
        cp.cp_rank, cp.cp_size, cp.strategy, cp.page_size = 0, 8, "zigzag", 16
        cp.placement, cp.exchange = PLACEMENTS["pages"](8, 16), "auto"
        cp.max_scratch_bytes = 1 << 30
        cp.mesh = tuple((2 * i, 2 * i + 1) for i in range(4))
        pages = -(-(extend + prefix) // 16)
        plan = cp.plan([extend], [extend + prefix], block_tables=[range(pages)])
        return cp.choose_exchange(plan, **layer)


def test_auto_knows_the_mesh():
    """Of 12 heads eight ranks cannot have as many each, but two can: half of the keys for each."""
    layer = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 128}
    choice = Elsewhere.choice(8192, 65536, **layer)
    assert choice.exchange == "usp"
    assert f"at most {choice.received_bytes['usp']} bytes" in choice.reason
    tokens, keys, result = 1024, 9216, 128 * 2 + 4
    assert choice.received_bytes["usp"] == (
        tokens * 6 * 128 * 2 + 7 * keys * 1 * 2 * 128 * 2 + tokens * 6 * result
    )
    merged = 4 * (2 * tokens) * 6 * 128  # a partial result of each of four rows of the mesh
    assert f"usp {3 * merged}" in choice.reason
    uneven = Elsewhere.choice(4096, 16384, **layer | {"num_heads": 33, "num_kv_heads": 3})
    assert uneven.exchange != "usp"
    assert "usp" not in uneven.reason
    assert "usp" in uneven.received_bytes
