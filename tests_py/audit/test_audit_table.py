# SPDX-License-Identifier: Apache-2.0
"""Tests that ran are recorded and printed in one table; tests that should have run are missed."""

import json
import platform

import pytest

from audit import records

pytestmark = pytest.mark.slow


TESTS = """
import pytest
from audit.records import note

@pytest.fixture(params=["mmx", "sse"])
def isa(request):
    note("instruction set", request.param)

@pytest.fixture(scope="module")
def trace():
    note("trace", "real", "12ab")

def test_kernel(isa):
    pass

def test_that_fails(isa):
    raise AssertionError

def test_skipped(isa):
    pytest.skip("no reason")

def test_reads(trace):
    pass

@pytest.mark.engine("pytest")
class TestEngine:
    def test_one(self):
        note("engine", "other", "1.2")

    def test_two(self):
        pass
"""
CPP_TESTS = """<?xml version="1.0"?>
<testsuites><testsuite name="Fp8">
  <testcase name="EveryCode/neon" classname="Isa/Fp8" status="run" result="completed"/>
  <testcase name="Rows/amx_twin_packed" classname="All/Kernel" status="run" result="completed"/>
  <testcase name="Bad/avx2" classname="All/Kernel" status="run" result="completed">
    <failure message="a.cc:1&#x0A;bad" type=""/>
  </testcase>
  <testcase name="Needs" classname="Fp8" status="run" result="skipped">
    <skipped message="a.cc:1&#x0A;no fork"><![CDATA[a.cc:1
no fork]]></skipped>
  </testcase>
</testsuite></testsuites>
"""
PART = '[[part]]\nkind = "{}"\nname = "{}"\nneeds = ["{}"]\n'
ABSENT, PRESENT = "variable: CPATTN_NONSENSE", "package: pytest"


def test_passed_tests_are_counted_by_what_they_ran_with(inner_runs):
    inner_runs.write(test_x=TESTS)
    inner_runs.run("--records=ran", "-n2")
    found = {(r.kind, r.name, r.version): r.passed for r in records.read(inner_runs.folder / "ran")}
    version = platform.python_version()
    assert found == {
        ("instruction set", "mmx", ""): 1,
        ("instruction set", "sse", ""): 1,
        ("trace", "real", "12ab"): 1,
        ("engine", "pytest", pytest.__version__): 2,
        ("engine", "other", "1.2"): 1,
        ("interpreter", version.rpartition(".")[0], version): 5,
    }


def test_the_table_has_the_runs_of_all_processes_and_stands_before_the_closing_line(inner_runs):
    ran = inner_runs.folder / "ran"
    inner_runs.write(test_x="def test_a():\n    pass\n")
    inner_runs.allow(PART.format("C++ tests", "asan", PRESENT))
    inner_runs.run("--records=ran")
    for name in ("asan.0.xml", "asan.7.xml", "qemu.xml"):
        (ran / name).write_text(CPP_TESTS.replace("skipped", "ignored"))
    step = {"kind": "step", "name": "clang-tidy", "version": "61 s", "run": "", "passed": 1}
    (ran / "steps.jsonl").write_text(json.dumps(step) + "\n")
    done = inner_runs.run("--records=ran", "--closing-table")
    assert done.returncode == 0, done.stdout
    *told, closing = done.stdout.partition(" what ran")[2].splitlines()[1:]
    python, run = platform.python_version(), records.name_of_this_run()
    assert [" ".join(line.split()) for line in told if line] == [
        "C++ tests asan 6 in C++, asan",
        "C++ tests qemu 3 in C++, qemu",
        "instruction set amx-twin 2 in C++, asan, 1 in C++, qemu",
        "instruction set neon 2 in C++, asan, 1 in C++, qemu",
        f"interpreter {python.rpartition('.')[0]} {python} 2 in {run}",
        "step clang-tidy 61 s",
    ]
    assert "1 passed" in closing


def test_a_skipped_cpp_test_fails_unless_it_is_allowed(inner_runs):
    inner_runs.write(test_x="def test_a():\n    pass\n")
    (inner_runs.folder / "ran").mkdir()
    (inner_runs.folder / "ran" / "asan.0.xml").write_text(CPP_TESTS)
    done = inner_runs.run("--records=ran", "--closing-table")
    assert done.returncode == 1, done.stdout
    assert "Needs was skipped: allowed_skips.toml has no entry for it" in done.stdout
    skip = '[[skip]]\ntests = "cpp/asan::*.Needs"\n'
    skip += 'reason = "no fork"\nneeds = ["{}"]\nwhy = ""\n'
    inner_runs.allow(skip.format(PRESENT))
    assert inner_runs.run("--records=ran", "--closing-table").returncode == 1
    inner_runs.allow(skip.format(ABSENT))
    assert inner_runs.run("--records=ran", "--closing-table").returncode == 0


def test_a_part_that_did_not_run_fails(inner_runs):
    inner_runs.write(test_x=TESTS.replace("raise AssertionError", "pass"))
    inner_runs.allow(
        PART.format("instruction set", "mmx", PRESENT)
        + PART.format("instruction set", "sse4", ABSENT)
        + PART.format("instruction set", "neon", PRESENT)
        + '[[part]]\nkind = "fuzzer"\n'
    )
    done = inner_runs.run("--records=ran", "--closing-table")
    assert done.returncode == 1, done.stdout
    assert "instruction set neon: no record of it, and this machine has all" in done.stdout
    assert "fuzzer : no record of it" in done.stdout
    assert "sse4" not in done.stdout
    assert ", 1 error" in done.stdout.splitlines()[-1]
