# SPDX-License-Identifier: Apache-2.0
"""Programs whose ranks disagree are refuted, each by its kind and at its lines."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from cpattn_proof import simulate


def ones(n=4, dtype=torch.float32):
    return torch.ones(n, dtype=dtype)


def is_first():
    return dist.get_rank() == 0


def neighbour(distance=1):
    return (dist.get_rank() + distance) % dist.get_world_size()


def lines_of(program):
    return {line for *_, line in program.__code__.co_lines()}


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


def send_to_each_other():
    dist.send(ones(), neighbour())
    dist.recv(ones(), neighbour(-1))


def groups_crosswise():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = (first, second) if is_first() else (second, first)
    if dist.get_rank() < 2:
        for group in groups:
            dist.barrier(group)


def other_end(call, waits=True):
    """Return a program whose first rank makes a call that takes two ranks, and no other does."""

    def program():
        if is_first():
            call(ones())
        if waits:
            dist.barrier()

    return program


def exchange_in_place():
    x = ones(6)
    dist.all_to_all_single(x, x)


def gather_to_the_wrong_place():
    whole, rank = torch.zeros(6), neighbour()
    dist.all_gather_single(whole, whole[2 * rank : 2 * rank + 2])


def scatter_from_what_is_filled():
    blocks = [ones(2), ones(2), ones(2)]
    dist.scatter(blocks[1] if is_first() else ones(2), blocks if is_first() else None, 0)


def with_gaps(call):
    """Make a call on a tensor with gaps; gloo reduces these, fills other rows, or raises."""
    return lambda: call(torch.zeros(3, 4)[:, 1:3])


NEXT = "each needs the next of ranks 0, 1, 2, 0"
GAPS = "sizes [3, 2] and strides [4, 1]"
MAX, SUM, DOUBLE, SINGLE = ReduceOp.MAX, ReduceOp.SUM, torch.float64, torch.float32


@pytest.mark.parametrize(
    ("kind", "program", "says"),
    [
        ("other-kind", lambda: dist.barrier() if is_first() else dist.all_reduce(ones()), ""),
        ("other-root", lambda: dist.broadcast(ones(), dist.get_rank() % 2), ""),
        ("other-op", lambda: dist.all_reduce(ones(), MAX if is_first() else SUM), ""),
        ("other-dtype", lambda: dist.all_reduce(ones(4, DOUBLE if is_first() else SINGLE)), ""),
        ("other-size", other_size, "4"),
        ("other-size", other_size_of_gathered, ""),
        ("other-size", other_splits, ""),
        ("other-group", lambda: dist.new_group([0, 1] if is_first() else [0, 2]), ""),
        ("other-size", other_message_size, ""),
        ("deadlock", lambda: dist.recv(ones(), neighbour()), NEXT),
        ("deadlock", send_to_each_other, NEXT),
        ("deadlock", groups_crosswise, "rank 0, 1 wait for ever: each needs the next of ranks 0"),
        (
            "rank-returned",
            lambda: dist.get_rank() != 2 and dist.barrier(),
            "rank 0, 1 wait for ever: rank 2 has returned",
        ),
        (
            "deadlock",
            lambda: dist.distributed_c10d._get_default_store().get("what nobody sets"),
            "nobody brings the key default_pg/what nobody sets",
        ),
        ("send-not-received", other_end(lambda x: dist.isend(x, 1)), ""),
        ("receive-not-sent", other_end(lambda x: dist.irecv(x, 1)), ""),
        ("not-joined", other_end(lambda x: dist.all_reduce(x, async_op=True), waits=False), ""),
        ("given-and-filled", exchange_in_place, ""),  # others may get rows that came before
        ("given-and-filled", gather_to_the_wrong_place, ""),
        ("given-and-filled", scatter_from_what_is_filled, ""),
        ("not-contiguous", with_gaps(dist.all_reduce), GAPS),
        ("not-contiguous", with_gaps(lambda x: dist.broadcast(x, 0)), GAPS),
        ("not-contiguous", with_gaps(lambda x: dist.reduce(x, 0)), GAPS),
        ("not-contiguous", with_gaps(lambda x: dist.send(x, 1) if is_first() else None), GAPS),
        (
            "not-contiguous",
            with_gaps(lambda x: dist.scatter(x, [ones(6)] * 3 if is_first() else None, 0)),
            GAPS,
        ),
        ("not-contiguous", with_gaps(lambda x: dist.reduce_scatter(ones(6), [x] * 3)), GAPS),
        ("remainder", lambda: dist.all_to_all_single(torch.empty(10), ones(10)), "10 rows to 3"),
    ],
)
def test_a_program_is_refuted_by_its_kind_and_at_its_lines(kind, program, says):
    report = simulate(program, ranks=3)
    (finding,) = report.findings
    assert (finding.invariant, finding.kind) == ("OWN" if kind == "remainder" else "SEQ", kind)
    assert says in finding.what
    assert report.exit_code == 1
    if finding.where and "key" not in says:
        assert __file__ in finding.where
    waiting = finding.details.get("waiting", [])
    for call in [*finding.details.get("calls", []), *waiting] if "key" not in says else ():
        assert call["file"] == __file__
        if program.__name__ != "program":  # "program" calls another function
            assert call["line"] in lines_of(program)
            place = f"{__file__}:{call['line']} in {program.__name__}"
            assert f"rank {call['rank']}  {place}" in finding.picture
    assert not waiting or {one["rank"] for one in waiting} == set(finding.ranks)
    if kind in ("send-not-received", "receive-not-sent", "not-joined"):
        assert finding.ranks == (0,)


def test_sends_may_pass_as_small_ones_do_over_gloo():
    assert "--buffered-sends" in simulate(send_to_each_other, ranks=3).findings[0].advice
    assert simulate(send_to_each_other, ranks=3, buffered_sends=True).proved


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
