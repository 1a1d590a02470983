# SPDX-License-Identifier: Apache-2.0
"""What operators do to their process is neither their fault where it is none, nor hides one."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import time

import pytest

import cpattn
from cpattn.proof import NotUsable, conform
from cpattn.proof.conformance.child import Child
from support.children import path_with
from support.proof.conformance import AT_EDGES

UNNAMED_SIGNAL = 35  # of those for real time, of which Python names the first and the last
LITTLE_MEMORY = 12 << 30  # address space that has no room for pages so far away


def tried(act, **options):
    """The report of an operator that does something in the case with a softcap."""

    def operator(q, k, v, *, softcap=0.0, **options):
        if softcap:
            act()
        return cpattn.paged_attention(q, k, v, softcap=softcap, **options)

    return conform(operator, signature="cpattn", **AT_EDGES, **options)


def starts_a_process():
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


@pytest.mark.parametrize("act", [os.fork, starts_a_process])
def test_an_operator_may_start_processes(act):
    """A copy of it that returns answers nothing."""
    report = tried(act)
    assert report.proved, report.text()
    assert report.facts["answered"] == report.facts["cases"] == report.facts["edges"]


def leaves_a_copy():
    """Which has the pipe of the process, and so keeps it open."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (leaves_a_copy, "with exit code 3"),
        (lambda: os.kill(os.getpid(), UNNAMED_SIGNAL), "by signal 35"),
    ],
)
def test_a_process_that_ends_is_a_crash(act, cause):
    (finding,) = tried(act, time_limit=1.0).findings
    assert finding.kind == "crash"
    assert f"the process ended {cause}" in finding.what


@pytest.mark.slow
def test_a_limit_of_memory_is_no_fault_of_an_operator(tmp_path):
    ran = subprocess.run(
        [
            sys.executable, "-m", "cpattn", "conform", "cpattn:paged_attention",
            "--signature", "cpattn", "--examples", "0",
        ],
        cwd=tmp_path, text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": path_with()},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LITTLE_MEMORY,) * 2),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_ctrl_c_while_it_imports_leaves_no_process(monkeypatch):
    def interrupted(child):
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "_first_words", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tried(os.getpid)
    assert "cpattn conform" not in {p.name for p in multiprocessing.active_children()}


def test_without_torch_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotUsable, match=r"ModuleNotFoundError: .*torch"):
        tried(os.getpid)
