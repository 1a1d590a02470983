# SPDX-License-Identifier: Apache-2.0
"""Seconds of folders, of parts of make, and of steps of .ci/run beside what is stored."""

import os
import subprocess
from pathlib import Path

from audit import steps
from support.places import ROOT

TESTS = "import time\n\ndef test_{0}():\n    time.sleep({1})\n"


def timed(times: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "timed.sh", *arguments],
        env=os.environ | {"MAKE_TIMES": str(times)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_parts_of_make_are_told_once(tmp_path):
    times = tmp_path / "build" / "times"
    assert timed(times, "packages", "sleep", "1").returncode == 0
    assert timed(times, "tests in C++", "true").returncode == 0
    assert timed(times, "fails", "false").returncode == 1
    (packages, tests) = times.read_text().splitlines()
    assert packages in ("packages\t1", "packages\t2")
    assert tests in ("tests in C++\t0", "tests in C++\t1")
    told = timed(times, "--table").stdout
    assert told.startswith("Time: packages ")
    assert told.endswith(" s\n")
    assert not times.exists()
    assert timed(times, "--table").stdout == ""


def test_a_run_tells_seconds_of_folders_parts_and_long_files(inner_runs):
    (inner_runs.folder / "tests_py" / "slow").mkdir(parents=True)
    inner_runs.write(
        **{"tests_py/slow/test_a": TESTS.format("a", 0.2), "test_b": TESTS.format("b", 0)}
    )
    times = inner_runs.folder / "times"
    times.write_text("building\t7\n")
    done = inner_runs.run("--file-seconds=0.1", MAKE_TIMES=str(times))
    assert done.returncode == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if " tests  " in line]
    assert [row[2:] for row in rows] == [["1", "tests", "slow"], ["1", "tests", "test_b.py"]]
    assert "tests_py/slow/test_a.py took 0 s; a file has 0.1 s" in done.stdout
    assert "Time: building 7 s, tests in Python " in done.stdout
    assert "passed" in done.stdout.splitlines()[-1]
    assert not times.exists()


def test_stored_steps_are_those_of_the_script(tmp_path):
    script = (ROOT / ".ci" / "run").read_text()
    for key, seconds in steps.skips.tomllib.loads(steps.LIST.read_text()).items():
        assert key.endswith((" CPUs, cold", " CPUs, warm"))
        assert [name for name in seconds if f'step "{name}"' not in script] == []
