# SPDX-License-Identifier: Apache-2.0
"""Programs whose ranks disagree, each refuted by its kind and at its lines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from cpattn.proof import simulate


def ones(n=4, dtype=torch.float32):
    return torch.ones(n, dtype=dtype)


def is_first():
    return dist.get_rank() == 0


def lines_of(program):
    return {line for *_, line in program.__code__.co_lines()}


def other_order():
    first, second = ones(2), ones(2)
    if is_first():
        dist.all_reduce(first)
        dist.broadcast(second, 0)
    else:
        dist.broadcast(second, 0)
        dist.all_reduce(first)


def other_size():
    dist.all_reduce(ones(5 if is_first() else 4))


def other_size_of_gathered():
    size = dist.get_world_size()
    dist.all_gather([ones() for _ in range(size)], ones(5 if is_first() else 4))


def other_splits():
    size = dist.get_world_size()
    takes = [2] + [1] * (size - 1) if is_first() else [1] * size
    dist.all_to_all_single(ones(sum(takes)), ones(size), takes, [1] * size)


def other_message_size():
    if is_first():
        dist.send(ones(3), 1)
    elif dist.get_rank() == 1:
        dist.recv(ones(4), 0)


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("other-kind", lambda: dist.barrier() if is_first() else dist.all_reduce(ones())),
        ("other-kind", other_order),
        ("other-root", lambda: dist.broadcast(ones(), dist.get_rank() % 2)),
        ("other-op", lambda: dist.all_reduce(ones(), ReduceOp.MAX if is_first() else ReduceOp.SUM)),
        (
            "other-dtype",
            lambda: dist.all_reduce(ones(dtype=torch.float64 if is_first() else torch.float32)),
        ),
        ("other-size", other_size),
        ("other-size", other_size_of_gathered),
        ("other-size", other_splits),
        ("other-group", lambda: dist.new_group([0, 1] if is_first() else [0, 2])),
        ("other-size", other_message_size),
    ],
)
def test_calls_that_differ_are_named(kind, program):
    report = simulate(program, ranks=3)
    (finding,) = report.findings
    assert (finding.invariant, finding.kind) == ("SEQ", kind)
    assert report.exit_code == 1
    assert all(call["file"] == __file__ for call in finding.details["calls"])
    assert {call["line"] for call in finding.details["calls"]} <= lines_of(program)


def test_the_picture_has_a_line_of_every_rank_that_has_called():
    (finding,) = simulate(other_size, ranks=4, seeds=(0,)).findings
    assert "float32 [5] to rank" in finding.what or "gives float32 [4]" in finding.what
    for call in finding.details["calls"]:
        line = f"rank {call['rank']}  {__file__}:{call['line']} in other_size  all_reduce"
        assert line in finding.picture


def fewer_groups():
    group = dist.new_group([0, 1])
    if is_first():
        group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(group)


def test_groups_that_some_ranks_have_not_made_are_waited_for():
    (finding,) = simulate(fewer_groups, ranks=3, seeds=(0,)).findings
    assert finding.kind in ("deadlock", "rank-returned")
    assert "new_group on group 2" in finding.picture


def wait_for_each_other():
    dist.recv(ones(), (dist.get_rank() + 1) % dist.get_world_size())


def send_to_each_other():
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(ones(), (rank + 1) % size)
    dist.recv(ones(), (rank - 1) % size)


def groups_crosswise():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = (first, second) if is_first() else (second, first)
    if dist.get_rank() < 2:
        for group in groups:
            dist.barrier(group)


def returns_early():
    if dist.get_rank() != 2:
        dist.barrier()


def wait_for_a_key():
    dist.distributed_c10d._get_default_store().get("what nobody sets")


@pytest.mark.parametrize(
    ("program", "kind", "what"),
    [
        (wait_for_each_other, "deadlock", "each needs the next of ranks 0, 1, 2, 0"),
        (send_to_each_other, "deadlock", "each needs the next of ranks 0, 1, 2, 0"),
        (groups_crosswise, "deadlock", "rank 0, 1 wait for ever: each needs the next of ranks 0"),
        (returns_early, "rank-returned", "rank 0, 1 wait for ever: rank 2 has returned"),
        (wait_for_a_key, "deadlock", "nobody brings the key default_pg/what nobody sets"),
    ],
)
def test_hangs_say_why_nobody_can_go_on(program, kind, what):
    (finding,) = simulate(program, ranks=3).findings
    assert (finding.invariant, finding.kind) == ("SEQ", kind)
    assert what in finding.what
    waiting = finding.details["waiting"]
    assert {one["rank"] for one in waiting} == set(finding.ranks)
    for one in waiting:
        if program is not wait_for_a_key:
            assert one["file"] == __file__
            assert one["line"] in lines_of(program)
            assert f"{__file__}:{one['line']} in {program.__name__}" in finding.picture


def test_sends_may_pass_as_small_ones_do_over_gloo():
    assert "--buffered-sends" in simulate(send_to_each_other, ranks=3).findings[0].advice
    assert simulate(send_to_each_other, ranks=3, buffered_sends=True).proved


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: is_first() and dist.isend(ones(), 1), "send-not-received"),
        (lambda: is_first() and dist.irecv(ones(), 1), "receive-not-sent"),
        (lambda: is_first() and dist.all_reduce(ones(), async_op=True), "not-joined"),
    ],
)
def test_calls_without_another_end_are_found_when_all_have_returned(call, kind):
    def program():
        call()
        if kind != "not-joined":
            dist.barrier()

    (finding,) = simulate(program, ranks=2).findings
    assert (finding.kind, finding.ranks) == (kind, (0,))
    assert __file__ in finding.where


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dist.all_reduce(x),
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.reduce(x, 0),
        lambda x: dist.send(x, 1) if is_first() else dist.recv(x, 0),
        lambda x: dist.scatter(x, [x.contiguous()] * 2 if is_first() else None, 0),
        lambda x: dist.reduce_scatter(torch.empty(3, 2), [x] * 2),
    ],
)
def test_tensors_with_gaps_are_found(call):
    """gloo reduces the elements between, fills rows that are not meant, or raises, as NCCL does."""
    (finding,) = simulate(lambda: call(torch.zeros(3, 4)[:, 1:3]), ranks=2).findings
    assert (finding.invariant, finding.kind) == ("SEQ", "not-contiguous")
    assert "sizes [3, 2] and strides [4, 1]" in finding.what
    assert __file__ in finding.where


def exchange_in_place():
    x = ones(4)
    dist.all_to_all_single(x, x)


def gather_to_the_wrong_place():
    whole = torch.zeros(4)
    dist.all_gather_single(whole, whole[:2] if not is_first() else whole[2:])


def scatter_from_what_is_filled():
    blocks = [ones(2), ones(2)]
    dist.scatter(blocks[1] if is_first() else ones(2), blocks if is_first() else None, 0)


@pytest.mark.parametrize(
    "program", [exchange_in_place, gather_to_the_wrong_place, scatter_from_what_is_filled]
)
def test_memory_that_is_given_and_filled_is_found(program):
    """gloo and NCCL give others what has come already, or not."""
    (finding,) = simulate(program, ranks=2).findings
    assert (finding.invariant, finding.kind) == ("SEQ", "given-and-filled")


def test_each_rank_may_fill_its_own_block_in_place():
    def program():
        rank = dist.get_rank()
        x = torch.arange(4.0)
        own = x[2 * rank : 2 * rank + 2]
        dist.all_gather_single(x, own)
        dist.reduce_scatter_single(own, x)
        blocks = list(x.chunk(2))
        dist.scatter(own, blocks if is_first() else None, 0)
        dist.gather(own, blocks if is_first() else None, 0)

    report = simulate(program, ranks=2)
    assert report.proved, report.text()


def test_rows_that_nobody_gets_break_ownership():
    x = torch.ones(9)
    (finding,) = simulate(lambda: dist.all_to_all_single(torch.empty(9), x), ranks=2).findings
    assert (finding.invariant, finding.kind) == ("OWN", "remainder")
    assert "9 rows to 2 ranks: 1 of them" in finding.what
