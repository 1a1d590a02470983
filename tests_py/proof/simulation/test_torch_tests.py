# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of process groups pass on simulated ranks, except those with a reason.

All released wheels have the names of torch that a simulation needs, or it does without them.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from audit.skips import tomllib
from cpattn_proof import NotUsable, simulate
from cpattn_proof.simulation.process import torch_names
from cpattn_proof.simulation.process_group import SimulatedGroup
from support.command_line import invoke
from support.places import ROOT
from support.proof.torch_tests import LEFT_OUT, reason_of, rows_of
from support.time_limits import PATIENCE


@pytest.fixture(scope="module")
def found(tmp_path_factory, module_children):
    """Return each test's outcome in a new process, as torch reads the environment on import."""
    path = tmp_path_factory.mktemp("torch") / "found.json"
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "support.proof.torch_tests", str(path)]
    run = module_children.run(command, env={**os.environ, **own}, timeout=4 * PATIENCE)
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())


@pytest.mark.slow
def test_all_pass_but_those_that_cannot_run(found):
    failed = {
        name: outcome
        for name, outcome in found.items()
        if outcome.startswith("failed") and not reason_of(name, outcome)
    }
    assert not failed
    assert sum(outcome == "passed" for outcome in found.values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("names", [names for names, _, _ in LEFT_OUT])
def test_what_is_left_out_really_fails(found, names):
    assert any(
        re.search(names, name) and outcome.startswith("failed") for name, outcome in found.items()
    )


@pytest.mark.slow
def test_the_page_has_the_table(found):
    page = (ROOT / "docs" / "proof" / "simulate.md").read_text(encoding="utf-8")
    assert "\n".join(rows_of(found)) in page


TABLE = tomllib.loads(Path(__file__).with_name("torch_releases.toml").read_text())
LOOKED_FOR = TABLE.pop("looked_for")
# These methods of groups are for backends in C++, or for parts that are not simulated.
NOT_SIMULATED = {
    "_add_ephemeral_timeout", "_end_coalescing", "_register_backend", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "_start_coalescing", "_wait_for_pending_works",
    "get_backend", "get_reconfigure_handle", "new_group", "new_window", "reconfigure",
}  # fmt: skip


def dotted(table):
    return {f"{module}.{name}" for module, names in table.items() for name in names}


@pytest.mark.parametrize("release", TABLE)
def test_released_wheels_have_the_names_that_are_used(release):
    absent = set(TABLE[release]["absent"])
    assert dotted(torch_names.NEEDED) | dotted(torch_names.OPTIONAL) == dotted(LOOKED_FOR)
    assert absent <= dotted(torch_names.OPTIONAL)
    assert set(TABLE[release]["methods_of_groups"]) - NOT_SIMULATED <= set(vars(SimulatedGroup))


def test_the_table_has_the_releases_that_are_said_to_work():
    minors = [tuple(map(int, release.split(".")[:2])) for release in TABLE]
    assert minors == [(2, minor) for minor in range(6, 16)]


def uses_groups():
    """Use a group with a tag and one without, destroy all groups, and make them again."""
    size = dist.get_world_size()
    for _ in range(2):
        groups = [dist.new_group(), c10d._new_group_with_tag(list(range(size)), pg_tag="mine")]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
            assert c10d._resolve_process_group(group.group_name) is group
        assert c10d._find_pg_by_ranks_and_tag("user:mine", list(range(size))) is groups[1]
        tags = {tag: len(known) for tag, known in c10d._world.tags_to_pg.items()}
        assert tags == {"": 2, "ptd:0": 1, "ptd:1": 1, "user:mine": 1}
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, torch.ones(1), 1 - dist.get_rank()),
            dist.P2POp(dist.irecv, torch.ones(1), 1 - dist.get_rank()),
        ])  # fmt: skip
        for work in works:
            work.wait()
        dist.destroy_process_group(groups[0])
        dist.destroy_process_group()
        dist.init_process_group()


@pytest.mark.parametrize("lacks", [(), ("_register_pg_in_world",)])
def test_groups_are_known_to_torch_as_its_own_makers_have_it(lacks, monkeypatch):
    for name in lacks:
        monkeypatch.delattr(c10d, name)
    report = simulate(uses_groups, ranks=2, seeds=(0,))
    assert report.proved, report.text()


def test_a_later_release_may_gather_into_one_tensor_and_add_options():
    def program():
        group, rank = dist.group.WORLD, dist.get_rank()
        whole = torch.empty(4 if rank == 1 else 0)
        options = dist.GatherOptions()
        options.rootRank = 1
        group.gather_single(whole, torch.full((2,), float(rank)), options).wait()
        assert whole.tolist() == ([0, 0, 1, 1] if rank == 1 else [])
        assert not getattr(group._get_backend(torch.device("cpu")), "supports_coalescing", False)
        options = TABLE["2.15.0"]["options_of_groups"]
        c10d._new_process_group_helper(2, rank, [0, 1], "gloo", None, "x", **dict.fromkeys(options))

    assert simulate(program, ranks=2, seeds=(0,)).proved


def test_a_release_that_lacks_a_name_is_refused_in_a_line(monkeypatch, tmp_path):
    """The line does not mention the program, which is not to blame."""
    for name in [name for name in sys.modules if name.startswith("cpattn_proof.simulation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(c10d, "_find_pg_by_ranks_and_tag")
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    run = invoke("simulate", str(script))
    assert run.exit_code == 2
    lacking = "torch.distributed.distributed_c10d._find_pg_by_ranks_and_tag"
    message = f"torch {torch.__version__} cannot be simulated: it has no {lacking}, which"
    assert run.output == f"Error: simulate: {message} releases 2.6 to 2.15 have\n"
    with pytest.raises(NotUsable, match="cannot be simulated"):
        torch_names._check()
