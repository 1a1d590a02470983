# SPDX-License-Identifier: Apache-2.0
"""Ranks share one process, but each has its own copy of all that a process has."""

import logging
import os
import random
import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpattn_proof import simulate, simulate_script
from support.time_limits import PATIENCE


def meet():
    dist.barrier()


def what_is_shared():
    """Return the state of the process that each rank has a copy of and must not change."""
    environment = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
    handler, dtype = signal.getsignal(signal.SIGTERM), torch.get_default_dtype()
    return environment, os.getcwd(), sys.path, list(sys.path), handler, dtype


def environment_is_of_the_rank():
    rank = str(dist.get_rank())
    assert os.environ["RANK"] == os.getenv("LOCAL_RANK") == rank
    assert os.environ["WORLD_SIZE"] == "3"
    os.environ["OF_RANK"] = rank
    meet()
    assert os.environ["OF_RANK"] == rank


def folder_and_path_are_of_the_rank():
    folder, before = os.getcwd(), list(sys.path)
    meet()
    os.chdir("inner")  # it would fail if ranks shared a folder
    sys.path = [str(dist.get_rank()), *sys.path]
    meet()
    assert os.getcwd() == os.path.join(folder, "inner")
    assert sys.path == [str(dist.get_rank()), *before]


def a_folder_that_is_removed_ends_no_rank():
    folder = f"{os.getcwd()}/{dist.get_rank()}"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    os.rmdir(folder)
    meet()


def signals_are_handled_by_each_rank():
    before, own = signal.getsignal(signal.SIGTERM), dist.get_rank()
    assert signal.signal(signal.SIGTERM, own) == before
    meet()
    assert signal.getsignal(signal.SIGTERM) == own
    signal.signal(signal.SIGALRM, own)
    assert signal.alarm(1) == 0  # a real alarm would end all ranks
    assert signal.setitimer(signal.ITIMER_REAL, 0.01) == (0.0, 0.0)
    time.sleep(0.1)


def the_default_dtype_is_of_the_rank():
    own = torch.float64 if dist.get_rank() else torch.float32
    torch.set_default_dtype(own)
    meet()
    assert torch.ones(1).dtype == own


def stores_are_those_of_their_address():
    first, second = (dist.TCPStore(host_name="a", port=port) for port in (1, 2))
    first.set("key", "1")
    meet()
    assert second.add("ranks", 1) in (1, 2, 3)
    assert not second.check(["key"])
    mine, other = dist.HashStore(), dist.HashStore()
    mine.set("rank", str(dist.get_rank()))
    assert not other.check(["rank"])
    assert mine.get("rank") == str(dist.get_rank()).encode()


@pytest.mark.parametrize(
    "program",
    [
        environment_is_of_the_rank,
        folder_and_path_are_of_the_rank,
        a_folder_that_is_removed_ends_no_rank,
        signals_are_handled_by_each_rank,
        the_default_dtype_is_of_the_rank,
        stores_are_those_of_their_address,
    ],
)
def test_what_a_rank_changes_is_its_own_and_stays_so(program, tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    before, path = what_is_shared(), sys.path
    assert simulate(program, ranks=3).proved
    assert what_is_shared() == before
    assert sys.path is path


def test_random_numbers_are_those_of_a_process_of_its_own():
    def program():
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002 - what programs use
        random.seed(1)
        meet()
        numbers = torch.rand(3)
        meet()
        return numbers.tolist(), np.random.rand(3).tolist(), random.random()  # noqa: NPY002

    torch.manual_seed(5)
    before = torch.get_rng_state()
    results = []
    simulate(lambda: results.append(program()), ranks=4)
    assert results == results[:1] * len(results)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", "hccl", "", None])
def test_every_backend_is_simulated(backend):
    def program():
        rank = int(os.environ["RANK"])
        if backend == "":
            dist.init_process_group()
        elif backend is None:
            store = dist.TCPStore("localhost", 29511, 2, rank == 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        else:
            dist.init_process_group(backend, init_method="tcp://10.0.0.1:29500")
        assert dist.get_rank() == rank
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == 2
        dist.destroy_process_group()
        assert not dist.is_initialized()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no NCCL here, and does not know HCCL's devices
        assert simulate(program, ranks=2, backend=None).proved


@pytest.mark.parametrize("is_own", [True, False])
def test_packages_are_imported_by_each_rank_where_asked(is_own, tmp_path, monkeypatch):
    (tmp_path / "of_ranks").mkdir()
    (tmp_path / "of_ranks" / "__init__.py").write_text("from .state import RANKS\n")
    (tmp_path / "of_ranks" / "state.py").write_text("RANKS = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_ranks as outside  # ranks must import their own instead

    outside.RANKS.append("outside")
    seen = {}

    def program():
        import of_ranks
        from of_ranks import state

        of_ranks.RANKS.append(dist.get_rank())
        meet()
        assert state.RANKS is of_ranks.RANKS
        seen[dist.get_rank()] = list(of_ranks.RANKS)

    simulate(program, ranks=3, seeds=(0,), own_modules=["of_ranks"] if is_own else [])
    assert sys.modules.pop("of_ranks") is outside
    del sys.modules["of_ranks.state"]
    if is_own:
        assert seen == {rank: [rank] for rank in range(3)}
    else:
        assert all(len(ranks) == 4 for ranks in seen.values())


SCRIPT = """
import sys
import torch.distributed as dist
import beside
sys.path.pop(0)  # the folder of the script

def main():
    dist.init_process_group()
    beside.RANK = dist.get_rank()
    __main__ = sys.modules["__main__"]
    __main__.mine = dist.get_rank()
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, Value(dist.get_rank()))
    assert [value.rank for value in objects] == list(range(dist.get_world_size()))
    assert beside.RANK == mine == dist.get_rank()
    print("arguments", sys.argv[1:], end=" ")
    dist.barrier()
    print("of", mine)

class Value:
    def __init__(self, rank):
        self.rank = rank

if __name__ == "__main__":
    main()
"""
WRITES = """
import logging, sys
import torch.distributed as dist
dist.init_process_group()
assert sys.stdout.fileno() >= 0
sys.stdout.reconfigure(line_buffering=True)
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.buffer.flush()
logger = logging.getLogger("of_ranks")
if not logger.handlers:  # modules are there once, and keep the stream of the first order
    logger.addHandler(logging.StreamHandler(sys.stdout))
logger.warning("logged")
dist.barrier()
print("no end", end="")
"""


@pytest.mark.parametrize(
    ("text", "size", "said"),
    [(SCRIPT, 3, ["arguments ['--a', 'b'] of {rank}"]), (WRITES, 2, ["bytes", "logged", "no end"])],
)
def test_scripts_have_modules_arguments_and_output_of_their_own(text, size, said, tmp_path, capfd):
    (tmp_path / "beside.py").write_text("RANK = None\n")
    (tmp_path / "script.py").write_text(text)
    path = list(sys.path)
    try:
        options = {"ranks": size, "quiet": False, "time_limit": PATIENCE}
        report = simulate_script(tmp_path / "script.py", ["--a", "b"], **options)
    finally:
        logging.getLogger("of_ranks").handlers.clear()
    assert report.proved, report.text()
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[rank {r}] {line.format(rank=r)}" for r in range(size) for line in said]
    assert "beside" not in sys.modules
    assert sys.path == path
