# SPDX-License-Identifier: Apache-2.0
"""Tensors that are used between a call and its wait, and results that depend on who comes first."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from cpattn.proof import simulate


def reads_before_wait():
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x + 1
    work.wait()


def writes_before_wait():
    x = torch.ones(4)
    work = dist.all_gather([torch.empty(4), torch.empty(4)], x, async_op=True)
    x.zero_()
    work.wait()


def writes_by_numpy_before_wait():
    x = torch.ones(4)
    work = dist.all_gather([torch.empty(4), torch.empty(4)], x, async_op=True)
    x.numpy()[2] = 7
    work.wait()


def fills_an_output_before_wait():
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.numpy()[1] = 3
    work.wait()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (reads_before_wait, "read-before-wait"),
        (writes_before_wait, "changed-in-flight"),
        (writes_by_numpy_before_wait, "changed-in-flight"),
        (fills_an_output_before_wait, "written-in-flight"),
    ],
)
def test_use_in_flight_is_found(program, kind):
    report = simulate(program, ranks=2)
    assert {finding.kind for finding in report.findings} == {kind}
    assert {finding.ranks for finding in report.findings} == {(0,), (1,)}
    assert __file__ in report.findings[0].where


def test_what_is_read_before_its_wait_is_not_there():
    """Reads that torch does not see, too, cannot be right by accident."""
    seen = []

    def program():
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        seen.append(x.numpy().copy())
        work.wait()
        seen.append(x.numpy().copy())

    simulate(program, ranks=1, seeds=(0,))
    assert torch.isnan(torch.from_numpy(seen[0])).all()
    assert seen[1].tolist() == [1, 1, 1, 1]


def test_columns_beside_those_in_flight_are_free():
    def program():
        both = torch.zeros(4, 6)
        both[:, :3] = dist.get_rank()
        works = [
            dist.irecv(both[2], 1 - dist.get_rank()),
            dist.isend(both[1], 1 - dist.get_rank()),
        ]
        both[0] += 1
        both[3, :] = both[0] * 2
        for work in works:
            work.wait()
        return both

    assert simulate(program, ranks=2).proved


def test_an_in_place_gather_is_no_change():
    def program():
        rank = dist.get_rank()
        whole = torch.zeros(8)
        whole[4 * rank : 4 * rank + 4] = rank + 1
        dist.all_gather_single(whole, whole[4 * rank : 4 * rank + 4])
        assert whole.tolist() == [1] * 4 + [2] * 4

    assert simulate(program, ranks=2).proved


def test_tensors_of_calls_that_are_over_are_let_go():
    """All of a long program would be more than memory has."""
    left = []

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        tensors = [torch.ones(8) for _ in range(4)]
        x, out, whole, message = tensors
        dist.all_reduce(x)
        dist.all_gather_single(torch.empty(8 * size), out)
        dist.reduce_scatter_single(torch.empty(8 // size), whole)
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        made = [weakref.ref(tensor) for tensor in tensors]
        del tensors, x, out, whole, message
        dist.barrier()
        left.append(sum(ref() is not None for ref in made))

    assert simulate(program, ranks=2, seeds=(0,)).proved
    assert left == [0, 0]


def takes_whoever_comes_first():
    total = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(dist.get_world_size() - 1):
            x = torch.empty(1)
            dist.recv(x)
            total = total * 0.5 + x
    else:
        dist.send(torch.tensor([float(dist.get_rank())]), 0)
    return total


def test_results_that_depend_on_the_order_of_arrival_are_found_and_replay():
    report = simulate(takes_whoever_comes_first, ranks=4)
    (finding,) = report.findings
    assert finding.kind == "order-of-arrival"
    first, second = finding.details["seeds"]
    assert f"--seed {first} --seed {second}" in finding.picture
    again = simulate(takes_whoever_comes_first, ranks=4, seeds=(first, second))
    assert again.findings == report.findings
    assert simulate(takes_whoever_comes_first, ranks=4, seeds=(second,)).proved


def test_parameters_are_compared_as_tensors_are():
    report = simulate(lambda: torch.nn.Parameter(takes_whoever_comes_first()), ranks=4)
    assert report.findings[0].kind == "order-of-arrival"


@pytest.mark.parametrize(
    "result",
    [
        torch.eye(2).to_sparse(),
        torch.empty(3, device="meta"),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(1).expand(3),
    ],
    ids=["sparse", "meta", "conjugated", "negated", "expanded"],
)
def test_any_tensor_may_be_returned(result):
    def program():
        dist.barrier()
        return result

    assert simulate(program, ranks=2).proved


@pytest.mark.parametrize("x", [torch.ones(1).expand(4), torch.arange(8.0)[::2]])
def test_rows_may_be_given_with_any_strides(x):
    def program():
        taken = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(taken, x)
        assert all(torch.equal(out, x) for out in taken)

    assert simulate(program, ranks=2).proved


def test_an_order_that_hangs_is_named():
    """Rank 0 takes the first message for that of rank 2."""

    def program():
        rank = dist.get_rank()
        if rank == 0:
            x = torch.empty(1)
            source = dist.recv(x)
            dist.recv(x, src=3 - source if source == 2 else 1)
        else:
            dist.send(torch.ones(1), 0)

    report = simulate(program, ranks=3, seeds=range(8))
    (finding,) = report.findings
    assert finding.kind == "deadlock" or finding.kind == "rank-returned"
    seed = finding.details["seed"]
    assert f"--seed {seed} replays it" in finding.what
    (again,) = simulate(program, ranks=3, seeds=(seed,)).findings
    assert again.details["waiting"] == finding.details["waiting"]


def test_what_differs_by_itself_is_said_not_to_be_checked():
    def program():
        dist.all_reduce(torch.tensor([time.perf_counter()], dtype=torch.float64))

    report = simulate(program, ranks=2)
    assert report.proved
    assert "two runs in one order differ" in report.not_checked["order of arrival"]
