# SPDX-License-Identifier: Apache-2.0
"""What a process has to itself, every rank has, although all share one."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpattn.proof import simulate, simulate_script


def meet():
    """Have all other ranks run."""
    dist.barrier()


def test_environment_is_of_the_rank_and_stays_so():
    def program():
        rank = str(dist.get_rank())
        assert os.environ["RANK"] == os.getenv("LOCAL_RANK") == rank
        assert os.environ["WORLD_SIZE"] == "3"
        os.environ["OF_RANK"] = rank
        meet()
        assert os.environ["OF_RANK"] == rank

    assert simulate(program, ranks=3).proved
    assert "OF_RANK" not in os.environ
    assert "RANK" not in os.environ


def test_folder_and_path_are_of_the_rank_and_stay_so(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    path, before = sys.path, list(sys.path)

    def program():
        meet()
        os.chdir("inner")  # of the others it was no folder then
        sys.path = [str(dist.get_rank()), *sys.path]
        meet()
        assert os.getcwd() == str(tmp_path / "inner")
        assert sys.path == [str(dist.get_rank()), *before]

    assert simulate(program, ranks=3).proved
    assert os.getcwd() == str(tmp_path)
    assert sys.path is path
    assert path == before


def test_a_folder_that_is_removed_ends_no_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def program():
        folder = tmp_path / str(dist.get_rank())
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        folder.rmdir()
        meet()

    assert simulate(program, ranks=2).proved
    assert os.getcwd() == str(tmp_path)


def test_signals_may_be_handled_by_each_rank():
    before = signal.getsignal(signal.SIGTERM)

    def program():
        own = dist.get_rank()
        assert signal.signal(signal.SIGTERM, own) == before
        meet()
        assert signal.getsignal(signal.SIGTERM) == own

    assert simulate(program, ranks=2).proved
    assert signal.getsignal(signal.SIGTERM) == before


def test_stores_are_those_of_their_address():
    def program():
        rank = str(dist.get_rank())
        first, second = (dist.TCPStore(host_name="a", port=port) for port in (1, 2))
        first.set("key", "1")
        meet()
        assert second.add("ranks", 1) in (1, 2)
        assert not second.check(["key"])
        mine, other = dist.HashStore(), dist.HashStore()
        mine.set("rank", rank)
        assert not other.check(["rank"])
        assert mine.get("rank") == rank.encode()

    assert simulate(program, ranks=2).proved


def test_random_numbers_are_those_of_a_process_of_its_own():
    def program():
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002 - what programs use
        random.seed(1)
        meet()
        numbers = torch.rand(3)
        meet()
        return numbers, np.random.rand(3), random.random()  # noqa: NPY002

    torch.manual_seed(5)
    before = torch.get_rng_state()
    results = []
    simulate(lambda: results.append(program()), ranks=4)
    for numbers, of_numpy, of_python in results:
        assert torch.equal(numbers, results[0][0])
        assert of_numpy.tolist() == results[0][1].tolist()
        assert of_python == results[0][2]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_dtype_is_of_the_rank():
    def program():
        if dist.get_rank():
            torch.set_default_dtype(torch.float64)
        meet()
        assert torch.ones(1).dtype == (torch.float64 if dist.get_rank() else torch.float32)

    assert simulate(program, ranks=2).proved
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", "hccl", "", None])
def test_every_backend_is_simulated(backend):
    def program():
        if backend == "":
            dist.init_process_group()
        elif backend is None:
            store = dist.TCPStore("localhost", 29511, 2, dist_rank() == 0)
            dist.init_process_group("gloo", store=store, rank=dist_rank(), world_size=2)
        else:
            dist.init_process_group(backend, init_method="tcp://10.0.0.1:29500")
        assert dist.get_rank() == dist_rank()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == 2
        dist.destroy_process_group()
        assert not dist.is_initialized()

    def dist_rank():
        return int(os.environ["RANK"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no NCCL here, and does not know HCCL's devices
        assert simulate(program, ranks=2, backend=None).proved


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose global the ranks write."""
    (tmp_path / "of_ranks").mkdir()
    (tmp_path / "of_ranks" / "__init__.py").write_text("from .state import RANKS\n")
    (tmp_path / "of_ranks" / "state.py").write_text("RANKS = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_ranks"
    for name in ("of_ranks", "of_ranks.state"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("is_own", [True, False])
def test_packages_are_imported_by_each_rank_where_asked(package, is_own):
    import of_ranks as outside  # must not be taken by ranks that import it themselves

    outside.RANKS.append("outside")
    seen = {}

    def program():
        import of_ranks
        from of_ranks import state

        of_ranks.RANKS.append(dist.get_rank())
        meet()
        assert state.RANKS is of_ranks.RANKS
        seen[dist.get_rank()] = list(of_ranks.RANKS)

    simulate(program, ranks=3, seeds=(0,), own_modules=[package] if is_own else [])
    if is_own:
        assert seen == {rank: [rank] for rank in range(3)}
    else:
        assert all(len(ranks) == 4 for ranks in seen.values())
    assert sys.modules["of_ranks"] is outside


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


def test_all_ways_to_write_come_out_once_and_by_line(tmp_path, capfd):
    (tmp_path / "script.py").write_text(WRITES)
    try:
        assert simulate_script(tmp_path / "script.py", ranks=2, quiet=False).proved
    finally:
        logging.getLogger("of_ranks").handlers.clear()
    expected = ["bytes", "logged", "no end"]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"[rank {rank}] {what}" for rank in range(2) for what in expected]


def test_what_is_printed_comes_once_although_an_order_is_run_again(tmp_path, capfd):
    (tmp_path / "script.py").write_text(ARRIVES)
    assert not simulate_script(tmp_path / "script.py", ranks=4, quiet=False).proved
    assert len(capfd.readouterr().out.splitlines()) == 4


ARRIVES = """
import torch
import torch.distributed as dist
dist.init_process_group()
print("here")
total, x = torch.zeros(1), torch.zeros(1)
if dist.get_rank():
    dist.send(torch.tensor([float(dist.get_rank())]), 0)
else:
    for _ in range(3):
        dist.recv(x)
        total = total * 0.5 + x
"""


def test_scripts_have_modules_arguments_and_output_of_their_own(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("RANK = None\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    path = list(sys.path)
    report = simulate_script(tmp_path / "script.py", ["--a", "b"], ranks=3, quiet=False)
    assert report.proved
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[rank {rank}] arguments ['--a', 'b'] of {rank}" for rank in range(3)]
    assert "beside" not in sys.modules
    assert sys.path == path
