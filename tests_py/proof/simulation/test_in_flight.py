# SPDX-License-Identifier: Apache-2.0
"""Uses of tensors between a call and its wait, and results by order of arrival, are found."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from cpattn_proof import simulate


def changes_by_numpy(x, place, value):
    x.numpy()[place] = value


@pytest.mark.parametrize(
    ("use", "gathers", "kind"),
    [
        (lambda x: x + 1, False, "read-before-wait"),
        (lambda x: x.zero_(), True, "changed-in-flight"),
        (lambda x: changes_by_numpy(x, 2, 7), True, "changed-in-flight"),
        (lambda x: changes_by_numpy(x, 1, 3), False, "written-in-flight"),
    ],
)
def test_use_in_flight_is_found(use, gathers, kind):
    def program():
        x = torch.ones(4)
        taken = [torch.empty(4), torch.empty(4)]
        call, options = (dist.all_gather, [taken, x]) if gathers else (dist.all_reduce, [x])
        work = call(*options, async_op=True)
        use(x)
        work.wait()

    report = simulate(program, ranks=2)
    assert {finding.kind for finding in report.findings} == {kind}
    assert {finding.ranks for finding in report.findings} == {(0,), (1,)}
    assert __file__ in report.findings[0].where


@pytest.mark.parametrize("receives_first", [False, True])
def test_a_call_that_fills_what_another_one_gives_is_named(receives_first):
    def program():
        x, other = torch.ones(4), 1 - dist.get_rank()
        calls = [lambda: dist.isend(x[:2], other), lambda: dist.irecv(x[1:3], other)]
        for work in [call() for call in (reversed(calls) if receives_first else calls)]:
            work.wait()

    finding = simulate(program, ranks=2, seeds=(0,)).findings[0]
    assert finding.kind == "changed-in-flight"
    assert "given by send to rank" in finding.what
    assert finding.what.endswith(", which recv fills, changed before its wait")
    begins, fills = finding.picture.splitlines()
    assert begins.endswith(" begins")
    assert "recv from rank" in fills
    assert fills.endswith(" fills its memory")


def test_what_is_read_before_its_wait_is_not_there():
    """Even reads that torch does not see cannot be right by accident, as they find NaN."""
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


def columns_beside_those_in_flight():
    both = torch.zeros(4, 6)
    other = 1 - dist.get_rank()
    both[:, :3] = dist.get_rank()
    works = [dist.irecv(both[2], other), dist.isend(both[1], other)]
    both[0] += 1
    both[3, :] = both[0] * 2
    for work in works:
        work.wait()
    return both


def gather_in_place():
    rank = dist.get_rank()
    whole = torch.zeros(8)
    whole[4 * rank : 4 * rank + 4] = rank + 1
    dist.all_gather_single(whole, whole[4 * rank : 4 * rank + 4])
    assert whole.tolist() == [1] * 4 + [2] * 4


@pytest.mark.parametrize("program", [columns_beside_those_in_flight, gather_in_place])
def test_what_is_not_in_flight_is_free(program):
    assert simulate(program, ranks=2).proved


def test_tensors_of_calls_that_are_over_are_let_go():
    """The tensors of a long program would otherwise fill the memory."""
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
)
def test_any_tensor_may_be_returned(result):
    def program():
        dist.barrier()
        return result

    assert simulate(program, ranks=2).proved


def test_rows_may_be_given_with_any_strides():
    def program():
        for x in (torch.ones(1).expand(4), torch.arange(8.0)[::2]):
            taken = [torch.empty(4) for _ in range(dist.get_world_size())]
            dist.all_gather(taken, x)
            assert all(torch.equal(out, x) for out in taken)

    assert simulate(program, ranks=2).proved


def test_an_order_that_hangs_is_named():
    """Rank 0 assumes that the first message is that of rank 2, so some orders hang."""

    def program():
        if dist.get_rank() == 0:
            x = torch.empty(1)
            source = dist.recv(x)
            dist.recv(x, src=3 - source if source == 2 else 1)
        else:
            dist.send(torch.ones(1), 0)

    (finding,) = simulate(program, ranks=3, seeds=range(8)).findings
    assert finding.kind in ("deadlock", "rank-returned")
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
