# SPDX-License-Identifier: Apache-2.0
"""`cpattn simulate` works as people use it; bytes, times and its page are what they count.

Scripts for GPUs come last; there is no GPU, so the CPU does what they ask of CUDA.
"""

import json
import sys
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import cpattn_proof
from support.command_line import invoke
from support.pages import run_page
from support.places import ROOT
from support.time_limits import PATIENCE

START = "import torch, sys, torch.distributed as dist\ndist.init_process_group()\n"
BARRIER = f"{START}print('here', *sys.argv[1:])\ndist.barrier()\n"
HANG = f"{START}if dist.get_rank(): dist.barrier()\n"
CATCHES = f"""{START}while True:
    try: torch.ones(3) + 1
    except BaseException: pass
"""


def in_a_process(children, folder, script, *options, arguments=()):
    (folder / "script.py").write_text(script)
    words = [sys.executable, "-m", "cpattn", "simulate", "--ranks", "2", *options]
    return children.run([*words, "script.py", *arguments], cwd=folder, timeout=PATIENCE)


@pytest.fixture
def simulate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(script, *options):
        (tmp_path / "script.py").write_text(script)
        return invoke("simulate", "--ranks", "2", *options, "script.py")

    return run


def test_what_holds_is_said_to(tmp_path, children):
    run = in_a_process(children, tmp_path, BARRIER, arguments=["--layers", "2"])
    assert run.returncode == 0, run.stderr
    assert "[rank 0] here --layers 2\n" in run.stdout
    assert run.stdout.count("here") == 2  # although it runs in three orders
    assert "script.py on 2 ranks: proved: SEQ (" in run.stdout
    assert "\n  not checked: results (no rank calls cpattn_proof.expect; " in run.stdout
    assert "barrier                        1 calls" in run.stdout


def test_options_behind_the_script_are_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(BARRIER)
    words = ["--seed", "0", "script.py", "--ranks=4", "--ranks", "4", "--layers", "2"]
    run = invoke("simulate", *words)
    warning = "Warning: --ranks stands after script.py and is given to it; options of cpattn"
    assert run.stderr == f"{warning} simulate stand before the script\n"
    assert "[rank 7] here --ranks=4 --ranks 4 --layers 2\n" in run.stdout


def test_json_is_alone_on_standard_output(simulate, tmp_path):
    run = simulate(HANG, "--json", "--seed", "3", "--trace", "trace.json")
    assert run.exit_code == 1
    report = json.loads(run.stdout)
    assert report["findings"][0]["kind"] == "rank-returned"
    assert report["facts"]["seeds"] == [3]
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def test_what_is_required_has_to_be_checked(simulate, tmp_path):
    run = simulate(BARRIER, "--require", "SEQ,RES", "--html", "report.html")
    assert run.exit_code == 2
    assert "script.py on 2 ranks: not judged, RES not checked (" in run.output
    page = (tmp_path / "report.html").read_text()
    assert "Not judged</span></h1>" in page
    assert "rank 1: barrier" in page  # the timeline says it
    run = simulate(f"{BARRIER}assert dist.get_rank() < 1\n", "--require", "RES", "--json")
    assert run.exit_code == 1
    assert json.loads(run.stdout)["checked"] == ["SEQ", "RES"]


@pytest.mark.slow
def test_a_program_that_does_not_end_is_ended(tmp_path, children):
    run = in_a_process(children, tmp_path, CATCHES, "--time-limit", "1")
    assert run.returncode == 2
    assert "not over after 1 s (--time-limit)" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"{START}dist.barrier()\nraise KeyError('layer')", "KeyError: 'layer' (script.py:4)"),
        (f"{START}dist.barrier()\nraise OSError('a\\nb')", "raised OSError: a b (script.py:4)"),
        ("print(", "never closed"),
    ],
)
def test_what_cannot_be_judged_ends_in_a_line(simulate, script, message):
    run = simulate(script)
    assert run.exit_code == 2
    *_, line = run.stderr.splitlines()
    assert line.startswith("Error: simulate: ")
    assert message in line
    assert ("Traceback" in run.stderr) == ("raise" in script)


@pytest.mark.slow
def test_the_page_is_run_from_top_to_bottom(tmp_path, children):
    run_page(ROOT / "docs" / "proof" / "simulate.md", tmp_path, children)


MESSAGE = 1 << 20  # bytes


def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    block = torch.zeros(MESSAGE, dtype=torch.uint8)
    for _ in range(3):
        works = [dist.irecv(torch.empty_like(block), (rank - 1) % size)]
        works.append(dist.isend(block, (rank + 1) % size))
        for work in works:
            work.wait()


def collectives():
    size = dist.get_world_size()
    x = torch.zeros(size * 100)
    dist.all_reduce(x)
    dist.all_gather([torch.empty_like(x) for _ in range(size)], x)
    dist.reduce_scatter(torch.empty(100), list(x.chunk(size)))
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.broadcast(x, 0)


def test_bytes_are_those_that_leave_a_rank():
    sent = cpattn_proof.simulate(collectives, ranks=4, seeds=(0,)).facts["sent_bytes_by_rank"]
    whole = 4 * 4 * 100
    assert sent["all_reduce"] == [2 * 3 * whole // 4] * 4
    assert sent["all_gather"] == [3 * whole] * 4
    assert sent["reduce_scatter"] == sent["all_to_all_single"] == [3 * whole // 4] * 4
    assert sent["broadcast"] == [whole, 0, 0, 0]


def test_messages_take_their_latency_and_their_bytes():
    """Three messages one after the other take three times as long as one."""
    slow = {"latency_us": 1e6, "gbps": MESSAGE * 8 / 1e9}
    facts = cpattn_proof.simulate(ring, ranks=2, seeds=(0,), **slow).facts
    assert facts["calls_by_rank"]["send"] == [3, 3]
    seconds = facts["predicted_seconds_by_rank"][0]
    computed = cpattn_proof.simulate(ring, ranks=2, seeds=(0,), latency_us=0, gbps=1e6).facts
    # A rank's link serves two directions: each round has 2 messages of 1 s and 1 s of bytes.
    # The rest is the CPU time of the program, which the fast links show as well.
    assert seconds >= 3 * 2 * 2
    assert computed["predicted_seconds_by_rank"][0] < 3 * 2 * 2


def test_the_trace_has_tracks_of_every_rank(tmp_path):
    path = tmp_path / "trace.json"
    cpattn_proof.simulate(ring, ranks=2, trace=path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    spans = [event for event in events if event["ph"] == "X"]
    sends = [event for event in spans if event["name"] == "send"]
    assert [event["args"]["sent_bytes"] for event in sends] == [MESSAGE] * 6
    assert all(__file__ in event["args"]["place"] for event in sends)
    tracks = defaultdict(list)
    for event in spans:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) == {(pid, tid) for pid in (0, 1) for tid in (0, 1)}
    for track in tracks.values():
        track.sort()
        for (_, end), (begin, _) in pairwise(track):
            assert begin == pytest.approx(end) or begin > end


GPU = """import os
import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl", device_id=device)
"""
#: The script has the shape of training and serving scripts.
USUAL = f"""{GPU}
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


@pytest.fixture
def no_device(monkeypatch):
    """Hide CUDA devices, and check that the test leaves no stand-in behind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(vars(torch.cuda))
    yield
    assert dict(vars(torch.cuda)) == before
    assert "record_stream" not in vars(torch.Tensor)


@pytest.mark.usefixtures("no_device")
def test_the_usual_script_is_run_and_the_report_says_on_what(simulate):
    result = simulate(USUAL)
    assert result.exit_code == 0, result.output
    reason = "its calls ran on the CPU; --no-cuda-as-cpu has them refused"
    assert f"  not checked: CUDA ({reason})\n" in result.output
    report = json.loads(simulate(USUAL, "--json", "--cuda-as-cpu", "--seed", "1").stdout)
    assert report["not_checked"]["CUDA"] == reason


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("script", "options", "code", "message"),
    [
        (f"assert __import__('torch').cuda.is_available()\n{GPU}dist.barrier()", (), 0, "CUDA ("),
        (f"import torch, sys\nif not torch.cuda.device_count(): sys.exit(3)\n{GPU}dist.barrier()",
         (), 0, "CUDA ("),
        (f"{GPU}x = torch.ones(4).cuda()\nwork = dist.all_reduce(x, async_op=True)\nx + 1",
         (), 1, "read-before-wait"),
        (f"{GPU}torch.cuda.set_device(local_rank + 1)", (), 2,
         "invalid device ordinal: 2 of 2 simulated devices"),
        (f"{GPU}torch.cuda.CUDAGraph()", (), 2,
         "calls torch.cuda.CUDAGraph, for which the CPU cannot stand in (--cuda-as-cpu)"),
        (GPU, ("--no-cuda-as-cpu",), 2, "rank 0 raised A"),
    ],
)  # fmt: skip
def test_verdicts_on_scripts_for_gpus(script, options, code, message, simulate):
    result = simulate(script, *options)
    assert result.exit_code == code, result.output
    assert message in result.output


@pytest.mark.usefixtures("no_device")
def test_programs_that_do_without_a_device_run_as_they_are():
    """A program that asks for a device and does without one runs on no stand-in."""
    seen = []

    def program():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.ones(2, device=device)
        seen.append((device, x.cpu() is x))
        dist.all_reduce(x)

    report = cpattn_proof.simulate(program, ranks=2)
    assert report.proved
    assert "CUDA" not in report.not_checked
    assert set(seen) == {("cpu", True)}
