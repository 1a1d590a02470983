# SPDX-License-Identifier: Apache-2.0
"""Seconds of folders, of parts of make, and of steps of .ci/run beside stored ones."""

from audit import steps
from support.places import ROOT

TESTS = "import time\n\ndef test_{0}():\n    time.sleep({1})\n"


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


def test_stored_steps_are_those_of_the_script():
    script = (ROOT / ".ci" / "run").read_text()
    for key, seconds in steps.skips.tomllib.loads(steps.LIST.read_text()).items():
        assert key.endswith((" CPUs, cold", " CPUs, warm"))
        assert [name for name in seconds if f'step "{name}"' not in script] == []
