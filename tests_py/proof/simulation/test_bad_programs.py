# SPDX-License-Identifier: Apache-2.0
"""Programs that cannot be judged get one clear message, and leave nothing running."""

import multiprocessing
import os
import posix
import signal
import sys
import threading
import unittest

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn_proof import NotUsable, simulate, simulate_script
from cpattn_proof.simulation import scheduler


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that threads, groups and the rest of the process are as they were before a test."""
    before, main = _process(), sys.modules["__main__"]
    yield
    assert _process() == before
    assert sys.modules["__main__"] is main
    assert not dist.is_initialized()


def _process():
    environment = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
    return set(threading.enumerate()), environment, list(sys.argv), os.fork


def raises():
    if dist.get_rank() == 1:
        raise KeyError("layer 3")
    dist.barrier()


def refuses_on_one_rank():
    parallel = ContextParallel(dist.group.WORLD, page_size=4)
    plan = parallel.plan([4], [4], block_tables=[[0]])
    parallel.gather(plan if dist.get_rank() else None, torch.ones(2, 1))


def exits_from_a_thread():
    thread = threading.Thread(target=os._exit, args=[0])
    thread.start()
    thread.join()
    dist.barrier()


def talks_from_a_thread():
    thread = threading.Thread(target=dist.barrier, name="helper")
    thread.start()
    thread.join()


def never_ends():
    dist.barrier()
    while True:
        pass


class Endless(Exception):
    def __str__(self):
        while True:
            pass


def raises_without_an_end():
    dist.barrier()
    raise Endless


class Nameless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises_without_a_text():
    raise Nameless


NEVER_END = (never_ends, raises_without_an_end)


def profiles():
    with torch.profiler.profile():
        dist.barrier()


def of_another_size():
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=5)


def starts_a_process():
    multiprocessing.get_context("spawn").Process(target=print).start()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (raises, r"rank 1 raised KeyError: 'layer 3' \(.*test_bad_programs.py:\d+\)$"),
        (
            refuses_on_one_rank,
            r"rank 1 raised RuntimeError: .*: rank 0 refused its arguments; nothing was sent: "
            r"TypeError: ContextParallel.gather: plan must be|"
            r"rank 0 raised TypeError: ContextParallel.gather: plan must be .*test_bad_program",
        ),
        (lambda: sys.exit(7), "rank [01] exits with 7"),
        (lambda: os._exit(7), "rank [01] exits with 7"),
        (exits_from_a_thread, r"rank [01] ends its process by os\._exit\(0\) in a thread"),
        (lambda: os.fork(), "rank [01] forks; all ranks are simulated in one process"),
        (lambda: os.forkpty(), "rank [01] forks"),
        (lambda: posix.fork(), "rank [01] forks"),
        (lambda: os.execv("/bin/true", ["true"]), "rank [01] replaces its process by another"),
        (lambda: os.execlp("true", "true"), "rank [01] replaces its process by another program"),
        (raises_without_a_text, "rank [01] raised Nameless: its text raises RuntimeError"),
        (lambda: os.abort(), "rank [01] aborts; all ranks are simulated in one process"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank [01] sends itself a signal; all"),
        (lambda: os.killpg(os.getpgrp(), signal.SIGTERM), "rank [01] sends itself a signal; all"),
        (lambda: signal.raise_signal(signal.SIGTERM), "rank [01] sends itself a signal; all"),
        (
            lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM),
            "rank [01] sends itself a signal; all",
        ),
        (starts_a_process, "rank [01] starts processes; all ranks"),
        (talks_from_a_thread, "rank [01] calls torch.distributed from a thread of its own, helper"),
        (list, "no rank communicates: there is nothing to judge"),
        (never_ends, r"not over after 2 s .*; rank [01] runs .*py:\d+ in never_ends"),
        (raises_without_an_end, r"not over after 2 s .*; rank [01] runs .*py:\d+ in __str__"),
        (lambda: dist.all_reduce(torch.eye(2).to_sparse()), "a tensor of layout torch.sparse_coo"),
        (profiles, "rank [01] profiles while rank [01] does; torch has one profiler"),
        (of_another_size, "rank must be 1, that of the process, got 0|world_size must be 2"),
    ],
)
def test_what_cannot_be_judged_says_why(program, message, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the stopped helper raises
    with pytest.raises(NotUsable, match=message) as raised:
        simulate(program, ranks=2, time_limit=2 if program in NEVER_END else 60)
    if program is raises:
        assert isinstance(raised.value.__cause__, KeyError)
        assert raised.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda _: None, "the sum is wrong"),
        (
            lambda x: torch.testing.assert_close(x, x + 1, rtol=0, atol=0),
            "Tensor-likes are not equal!",
        ),
        (lambda x: np.testing.assert_array_equal(x, x + 1), "Arrays are not equal"),
        (lambda x: unittest.TestCase().assertEqual(x[0], 2), "tensor(1.) != 2"),  # noqa: PT009
    ],
)
def test_an_assertion_that_fails_refutes_by_its_line(check, message):
    """`sgl-project/sglang#33353` swapped heads over 4 ranks, not 2, and no call differed."""

    def program():
        x = torch.ones(2)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        check(x)
        assert x[0] == 3, message

    (finding,) = simulate(program, ranks=2).findings
    assert (finding.invariant, finding.kind) == ("RES", "assertion")
    (rank,) = finding.ranks
    assert finding.what == f"rank {rank} asserts what does not hold: {message}"
    assert finding.where.startswith(f"{__file__}:")
    assert finding.where.endswith((" in program", " in <lambda>"))
    assert "assert" in finding.picture.splitlines()[1]


def test_assertions_of_libraries_and_of_torch_cannot_be_judged():
    def program():
        dist.barrier()
        torch.nn.Linear(2, 2).cuda()  # it asserts that torch was compiled with CUDA

    with pytest.raises(NotUsable, match="raised AssertionError: Torch not compiled"):
        simulate(program, ranks=2, cuda_as_cpu=False)


def returns_early():
    """Return early by `os._exit`, which would end the simulation before it has said anything."""
    dist.barrier()
    if dist.get_rank():
        os._exit(0)
    dist.barrier()


def catches_every_exception():
    try:
        dist.recv(torch.ones(1), 1 - dist.get_rank())
    except Exception:
        dist.barrier()


@pytest.mark.parametrize(
    ("program", "kind"), [(returns_early, "rank-returned"), (catches_every_exception, "deadlock")]
)
def test_a_rank_that_ends_or_cannot_go_on_is_named(program, kind):
    assert simulate(program, ranks=2).findings[0].kind == kind


def test_one_rank_may_profile():
    """Another rank may profile after it; two at a time would end the process."""
    events = []

    def program():
        for rank in range(2):
            if dist.get_rank() == rank:
                with torch.profiler.profile() as profile:
                    torch.ones(3)
                    dist.barrier()
                events.append([event.name for event in profile.events()])
            else:
                dist.barrier()

    assert simulate(program, ranks=2, seeds=(0,)).proved
    assert len(events) == 2
    assert all("aten::ones" in names for names in events)


def test_a_rank_that_cannot_be_ended_leaves_nothing_in_place(monkeypatch):
    """The rank disturbs nobody while it is still in C, nor after it returns from there."""
    monkeypatch.setattr(scheduler, "_AFTER_THE_END", 0.05)
    held, begun = threading.Lock(), threading.Event()
    held.acquire()
    ranks = []

    def program():
        ranks.append(threading.current_thread())
        sys.argv = ["of a rank"]
        dist.barrier()
        begun.set()
        held.acquire()  # an exception cannot end this wait

    before = _process()
    with pytest.raises(NotUsable, match="not over after"):
        simulate(program, ranks=2, time_limit=2)
    assert begun.is_set()
    assert _process()[1:] == before[1:]
    assert not dist.is_initialized()
    assert scheduler.are_left()
    assert simulate(dist.barrier, ranks=2).proved
    held.release()
    for rank in ranks:
        rank.join(60)
    assert not scheduler.are_left()
    assert _process() == before


def raise_error():
    raise ValueError("not finite")


@pytest.mark.parametrize("end", [raise_error, lambda: sys.exit(1), lambda: os.fork(), never_ends])
def test_a_finding_goes_before_the_end_that_it_leads_to(end):
    def program():
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        if not torch.isfinite(x).all():
            end()
        work.wait()

    report = simulate(program, ranks=2, time_limit=2 if end is never_ends else 60)
    assert report.findings[0].kind == "read-before-wait"


def test_a_simulation_in_a_simulation_and_scripts_that_are_none_are_refused(tmp_path):
    with pytest.raises(NotUsable, match="there is a simulation in this process already"):
        simulate(lambda: simulate(list), ranks=2)
    assert simulate(dist.barrier, ranks=2).proved
    with pytest.raises(NotUsable, match="No such file"):
        simulate_script(tmp_path / "missing.py")
    (tmp_path / "bad.py").write_text("def (:\n")
    with pytest.raises(NotUsable, match="invalid syntax"):
        simulate_script(tmp_path / "bad.py")


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"ranks": 0}, "ranks must be within 1 and 64, got 0"),
        (ValueError, {"seeds": (1, 1)}, r"seeds must be distinct, got \[1, 1\]"),
        (ValueError, {"seeds": (-1,)}, "seeds must be within 0 and"),
        (ValueError, {"time_limit": 0}, "time_limit must be within"),
        (ValueError, {"latency_us": -1}, "latency_us must be within"),
        (ValueError, {"gbps": 0}, "gbps must be within"),
        (ValueError, {"own_modules": ["torch"]}, r"own_modules .* must not have .* got 'torch'"),
        (ValueError, {"own_modules": ["of_nobody"]}, "own_modules .* must be names of packages"),
        (TypeError, {"fn": 3}, "fn must be callable, got int"),
        (TypeError, {"ranks": "8"}, "ranks must be an integer, got '8'"),
        (TypeError, {"cuda_as_cpu": 1}, "cuda_as_cpu must be True, False or None, got 1"),
        (TypeError, {"gbps": "1"}, "gbps must be a number, got '1'"),
        (TypeError, {"seeds": 3}, "seeds must be a sequence of integers, got 3"),
        (TypeError, {"seeds": [0.5]}, r"seeds must be an integer, got 0\.5"),
        (TypeError, {"own_modules": "json"}, "own_modules must be a sequence of"),
    ],
)
def test_options_are_checked(error, options, message):
    with pytest.raises(error, match=f"simulate: {message}"):
        simulate(**{"fn": list, **options})


def test_unknown_required_ids_are_refused_before_anything_runs():
    ran = []
    with pytest.raises(ValueError, match=r"require: ids must be of .* got 'COF'"):
        simulate(lambda: ran.append(1), ranks=2, require=["COF"])
    assert not ran
