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

SECONDS_OF_A_TEST = 3.0  # edges are tried all the same; a case need not be the smallest here
UNNAMED_SIGNAL = 35  # of those for real time, of which Python names the first and the last
LITTLE_MEMORY = 12 << 30  # address space that has no room for pages so far away


def right(q, k, v, **options):
    return cpattn.paged_attention(q, k, v, **options)


def tried(operator, **options):
    return conform(operator, signature="cpattn", examples=0, seconds=SECONDS_OF_A_TEST, **options)


def test_a_copy_that_returns_answers_nothing():
    def operator(q, k, v, *, softcap=0.0, **options):
        if softcap:
            os.fork()
        return right(q, k, v, softcap=softcap, **options)

    report = tried(operator)
    assert report.proved, report.text()
    assert report.facts["answered"] == report.facts["cases"]
    assert report.facts["cases"] == tried(right).facts["cases"]


def test_a_process_that_ends_is_a_crash_though_others_have_its_pipe():
    def operator(q, k, v, *, softcap=0.0, **options):
        if softcap:
            if os.fork() == 0:
                time.sleep(600)
            os._exit(3)
        return right(q, k, v, **options)

    (finding,) = tried(operator, time_limit=1.0).findings
    assert finding.kind == "crash"
    assert "the process ended with exit code 3" in finding.what


def test_signals_without_a_name_have_a_number():
    def operator(q, k, v, *, softcap=0.0, **options):
        if softcap:
            os.kill(os.getpid(), UNNAMED_SIGNAL)
        return right(q, k, v, **options)

    (finding,) = tried(operator).findings
    assert "the process ended by signal 35" in finding.what


def test_an_operator_may_start_processes():
    def operator(q, k, v, **options):
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join()
        return right(q, k, v, **options)

    report = tried(operator)
    assert report.proved, report.text()


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
        tried(right)
    assert "cpattn conform" not in {p.name for p in multiprocessing.active_children()}


def test_without_torch_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotUsable, match=r"ModuleNotFoundError: .*torch"):
        tried(right)
