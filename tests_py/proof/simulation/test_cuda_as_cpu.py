# SPDX-License-Identifier: Apache-2.0
"""Scripts for GPUs on a machine that has none: the CPU does what they ask of CUDA."""

from __future__ import annotations

import json

import pytest
import torch

from cpattn_proof import simulate
from support.command_line import invoke

START = """import os
import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl", device_id=device)
"""
#: Of the shape that training and serving scripts have.
USUAL = f"""{START}
rank, size = dist.get_rank(), dist.get_world_size()
assert torch.cuda.is_available() and torch.cuda.device_count() == size
assert torch.cuda.current_device() == local_rank
assert torch.cuda.get_device_properties(device).total_memory > torch.cuda.memory_allocated()
assert "CPU" in torch.cuda.get_device_name(), torch.cuda.get_device_capability() >= (8, 0)
torch.cuda.manual_seed_all(7)
model = torch.nn.Linear(4, 4).to(device).cuda()
host = torch.full((4,), float(rank), pin_memory=True).pin_memory()
x = host.cuda(non_blocking=True)
assert x.is_cuda and (x + 1).is_cuda and x.to(device) is x and not host.is_cuda
with torch.device(device), torch.cuda.device(local_rank):
    y = torch.zeros(4)
z = torch.ones(4, device=f"cuda:{{local_rank}}").to(x.device, torch.float32)
side = torch.cuda.Stream()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    assert torch.cuda.current_stream() is side
    x.record_stream(side)
    work = dist.all_reduce(x, async_op=True)
work.wait()
torch.cuda.current_stream().wait_event(side.record_event())
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0 and torch.cuda.current_stream() is not side
before = x.cpu()
x.zero_()
assert host.tolist() == [rank] * 4 and before.tolist() == [sum(range(size))] * 4
with torch.cuda.nvtx.range("step"), torch.autocast("cuda", dtype=torch.bfloat16):
    model(z).sum().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    assert parameter.grad.is_cuda
torch.save(x, f"{{rank}}.pt")
assert torch.load(f"{{rank}}.pt", map_location=device).sum().item() == 0
torch.cuda.empty_cache()
dist.barrier(device_ids=[local_rank])
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def no_device_and_nothing_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(vars(torch.cuda))
    yield
    assert dict(vars(torch.cuda)) == before
    assert "record_stream" not in vars(torch.Tensor)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def simulated(script, *options):
        (tmp_path / "script.py").write_text(script)
        return invoke("simulate", "--ranks", "2", *options, "script.py")

    return simulated


def test_the_usual_script_is_run_and_the_report_says_on_what(run):
    result = run(USUAL)
    assert result.exit_code == 0, result.output
    reason = "its calls ran on the CPU; --no-cuda-as-cpu has them refused"
    assert f"  not checked: CUDA ({reason})\n" in result.output
    report = json.loads(run(USUAL, "--json", "--cuda-as-cpu", "--seed", "1").stdout)
    assert report["not_checked"]["CUDA"] == reason


@pytest.mark.parametrize(
    ("script", "options", "code", "message"),
    [
        (f"assert __import__('torch').cuda.is_available()\n{START}dist.barrier()", (), 0, "CUDA ("),
        (f"import torch, sys\nif not torch.cuda.device_count(): sys.exit(3)\n{START}dist.barrier()",
         (), 0, "CUDA ("),
        (f"{START}x = torch.ones(4).cuda()\nwork = dist.all_reduce(x, async_op=True)\nx + 1",
         (), 1, "read-before-wait"),
        (f"{START}torch.cuda.set_device(local_rank + 1)", (), 2,
         "invalid device ordinal: 2 of 2 simulated devices"),
        (f"{START}torch.cuda.CUDAGraph()", (), 2,
         "calls torch.cuda.CUDAGraph, for which the CPU cannot stand in (--cuda-as-cpu)"),
        (START, ("--no-cuda-as-cpu",), 2, "rank 0 raised A"),
    ],
)  # fmt: skip
def test_verdicts_on_scripts_for_gpus(script, options, code, message, run):
    result = run(script, *options)
    assert result.exit_code == code, result.output
    assert message in result.output


def test_programs_that_do_without_a_device_run_as_they_are():
    """Neither a failure of their own nor a question has them run on devices."""
    seen = []

    def program():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.ones(2, device=device)
        seen.append((device, x.cpu() is x))
        torch.distributed.all_reduce(x)

    report = simulate(program, ranks=2)
    assert report.proved
    assert "CUDA" not in report.not_checked
    assert set(seen) == {("cpu", True)}
