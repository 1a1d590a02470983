# SPDX-License-Identifier: Apache-2.0
"""The tutorial about two ranks of sglang, followed like by a reader, and the part that it needs."""

import re
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="sglang is not installed")

import psutil
import torch

from cpattn.integrations.sglang import cp_cpu, plugin
from support.children import path_with
from support.entry_points import write_distribution
from support.pages import blocks_in, run_page
from support.places import ROOT
from support.sglang.sglang_models import ENVIRONMENT, mapped_by, shared_memory, unlink
from support.time_limits import PATIENCE

START = 400.0  # seconds, of an engine of two ranks on a busy machine
pytestmark = pytest.mark.engine("sglang")
PAGE = ROOT / "docs" / "tutorials" / "sglang_over_ranks.md"


@pytest.mark.slow
@pytest.mark.timeout(3 * START)
def test_the_commands_of_the_tutorial(tmp_path, children):
    before = shared_memory()
    (tmp_path / "site").mkdir()
    write_distribution(tmp_path / "site")
    environment = {**ENVIRONMENT, "PYTHONPATH": path_with(tmp_path / "site")}  # it seems installed
    run_page(PAGE, tmp_path, children, environment, timeout=START)
    in_use = mapped_by(psutil.process_iter())
    unlink(shared_memory() - before - in_use)  # sglang kills the process that would do it


def test_it_is_installed_as_the_page_about_sglang_says():
    (setup,) = [block.text for block in blocks_in(PAGE) if block.title == "Set up"]
    page = (ROOT / "docs" / "how_to" / "sglang.md").read_text()
    wanted = [line for line in setup.splitlines() if re.match(r"pip|  ", line)]
    assert len(wanted) == 8
    assert all(line in page for line in wanted)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_stream_is_that_of_the_cpu_on_a_cpu_alone(device):
    """The original function is restored when sglang's call ends, even by an error."""

    def original(runner, batch):
        asked.append(torch.cuda.current_stream)
        raise ValueError(batch)

    asked, before = [], torch.cuda.current_stream
    runner = SimpleNamespace(model_runner=SimpleNamespace(device=device))
    with pytest.raises(ValueError, match="a batch"):
        cp_cpu.execute_extend_cp(original, runner, "a batch")
    assert asked == [torch.cpu.current_stream if device == "cpu" else before]
    assert torch.cuda.current_stream is before


def test_the_stream_is_that_of_the_cpu_until_calls_on_all_threads_return(monkeypatch):
    before = torch.cuda.current_stream
    monkeypatch.setattr(torch.cuda, "current_stream", before)  # restored even if the test fails
    runner = SimpleNamespace(model_runner=SimpleNamespace(device="cpu"))
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def first(runner):
        begun.set()
        assert go_on.wait(PATIENCE)

    def second(runner):
        go_on.set()
        other.join()
        asked.append(torch.cuda.current_stream)

    other = threading.Thread(target=cp_cpu.execute_extend_cp, args=[first, runner])
    other.start()
    assert begun.wait(PATIENCE)
    cp_cpu.execute_extend_cp(second, runner)
    assert asked == [torch.cpu.current_stream]
    assert torch.cuda.current_stream is before


@pytest.mark.parametrize("parts", [set(), {"cp_cpu"}])
def test_a_server_that_would_stop_says_so_when_it_starts(parts, monkeypatch, caplog):
    attention = SimpleNamespace(CpattnAttnBackend=lambda runner: "a backend")
    monkeypatch.setitem(sys.modules, "cpattn.integrations.sglang.attention", attention)
    monkeypatch.setattr(plugin, "_active", parts)
    runner = SimpleNamespace(server_args=SimpleNamespace(enable_prefill_cp=True))
    assert plugin._make_backend(runner) == "a backend"
    said = [record.message for record in caplog.records]
    assert len(said) == (not parts)
    assert all("CPATTN_SGLANG_PARTS must list cp_cpu" in message for message in said)
