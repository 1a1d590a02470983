# SPDX-License-Identifier: Apache-2.0
"""Simulated programs have no findings, and the same bits as processes that use gloo."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from cpattn_proof import NotUsable, simulate
from support.distributed.distributed_worker import run_world
from support.proof.collective_programs import STEPS, run_program, run_programs
from support.proof.random_programs import alarm_of

KINDS = {
    "new_group", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "gather", "scatter", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "send",
    "recv", "barrier",
}  # fmt: skip


def proved(program, ranks, **options):
    report = simulate(program, ranks=ranks, **options)
    assert report.proved, report.text()


@pytest.mark.parametrize(
    ("size", "num_steps"),
    [(2, len(STEPS)), pytest.param(5, 2 * len(STEPS), marks=pytest.mark.slow)],
)
def test_random_programs_have_the_results_of_gloo(size, num_steps, tmp_path):
    seeds = range(size, size + size // 2)
    kinds = set()
    expected = run_world(size, tmp_path, run_programs, seeds, num_steps)
    for number, seed in enumerate(seeds):
        results = {}

        def program(seed=seed, results=results):
            results[dist.get_rank()] = run_program(seed, num_steps)

        report = simulate(program, ranks=size)
        assert report.proved, report.text()
        kinds |= set(report.facts["calls_by_rank"])
        for rank in range(size):
            assert len(results[rank]) == len(expected[rank][number])
            for mine, theirs in zip(results[rank], expected[rank][number], strict=True):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)
    assert kinds == KINDS


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.AVG, 2.0),
        (dist.ReduceOp.BXOR, 1 ^ 2 ^ 3),
        (dist.ReduceOp.PRODUCT, 6),
        (dist._make_nccl_premul_sum(2.0), 12.0),
    ],
)
def test_operators_that_gloo_has_not_for_all_dtypes(op, expected):
    dtype = torch.int64 if isinstance(expected, int) else torch.float32

    def program():
        x = torch.tensor([dist.get_rank() + 1]).to(dtype)
        dist.all_reduce(x, op)
        assert x.item() == expected

    assert simulate(program, ranks=3).proved


def test_calls_that_few_programs_make():
    """torch's own tests do not try these calls; see test_torch_tests.py."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        tensors = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
        with dist._coalescing_manager():
            for x in tensors:
                dist.all_reduce(x)
        assert all((x == sum(range(size))).all() for x in tensors)
        x = torch.tensor([rank])
        if rank:
            dist.send(x, 0, tag=rank)
        else:
            for source in reversed(range(1, size)):
                assert dist.recv(x, tag=source) == source == x.item()
        future = dist.all_reduce(x, async_op=True).get_future()
        assert future.wait()[0] is x
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass

    proved(program, 4)


def test_transposed_tensors_are_taken_as_they_lie():
    """Rows and columns are right only if tensors lie alike on all ranks, as over gloo."""

    def program():
        x = torch.arange(6.0).view(2, 3)
        if dist.get_rank():
            x = torch.zeros(3, 2).t()
        dist.broadcast(x, 0)
        assert x.tolist() == ([[0, 2, 4], [1, 3, 5]] if dist.get_rank() else [[0, 1, 2], [3, 4, 5]])
        x = torch.arange(6.0).view(2, 3).t()
        dist.all_reduce(x)
        assert x.tolist() == [[0, 6], [2, 8], [4, 10]]

    proved(program, 2)


def test_roots_are_ranks_of_the_group():
    with pytest.raises(NotUsable, match=r"raised ValueError: group 0 of ranks 0, 1 has no rank 7"):
        simulate(lambda: dist.broadcast(torch.ones(1), 7), ranks=2)


def test_meshes_and_subgroups():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        x = torch.tensor([dist.get_rank()])
        dist.all_reduce(x, group=mesh["heads"].get_group())
        assert x.item() == [1, 5][dist.get_rank() // 2]
        own, _ = dist.new_subgroups(2)
        local = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        dist.barrier(own)
        dist.barrier(local)
        alone = dist.new_group([dist.get_rank()])  # all groups have one name, but no common rank
        dist.barrier(alone)

    proved(program, 4)


def test_gradients_come_through_functional_collectives():
    def program():
        x = torch.ones(4, requires_grad=True)
        scaled = x * (dist.get_rank() + 1)
        mine = functional.all_to_all_single_autograd(scaled, [2, 2], [2, 2], dist.group.WORLD)
        (mine * 5).sum().backward()
        assert x.grad.tolist() == [5 * (dist.get_rank() + 1)] * 4

    proved(program, 2)


@pytest.mark.parametrize("number", range(6))
def test_right_programs_are_proved(number, one_torch_thread):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of names that have newer ones
        assert alarm_of(3, number) is None
