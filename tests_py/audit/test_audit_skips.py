# SPDX-License-Identifier: Apache-2.0
"""Skips in the list are allowed if the machine lacks their need; other skips fail."""

import pytest

from audit import skips

pytestmark = pytest.mark.slow


TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.skipif(True, reason="no engine")
def test_marked():
    raise AssertionError

def test_in_its_body():
    pytest.skip("no file")

@pytest.fixture
def engine():
    pytest.skip("no engine")

def test_of_a_fixture(engine):
    raise AssertionError

@pytest.mark.xfail(reason="a known bug")
def test_known_bug():
    raise AssertionError
"""
MODULE = "import pytest\npytest.importorskip('nonsense_engine', reason='no nonsense')\n"
ABSENT = "variable: CPATTN_NONSENSE"
ENTRY = '[[skip]]\ntests = "{}"\nreason = "{}"\nneeds = ["{}"]\nwhy = ""\n'
ALLOWED = ENTRY.format("test_x.py", "^no engine$", ABSENT) + ENTRY.format(
    "test_x.py::test_in_*", "file", ABSENT
)


def test_what_the_list_allows_is_skipped(inner_runs):
    inner_runs.write(test_x=TESTS, test_module=MODULE)
    inner_runs.allow(ALLOWED + ENTRY.format("*", "no nonsense", "package: nonsense_engine"))
    done = inner_runs.run("--strict-skips")
    assert done.returncode == 0, done.stdout
    assert "4 skipped, 0 of them without leave of allowed_skips.toml" in done.stdout
    assert "1 passed, 4 skipped, 1 xfailed" in done.stdout.splitlines()[-1]


def test_other_skips_fail(inner_runs):
    inner_runs.write(test_x=TESTS, test_module=MODULE)
    done = inner_runs.run("--strict-skips", "-n2")
    assert done.returncode == 1, done.stdout
    for reason in ("no engine", "no file", "no nonsense"):
        assert f"skipped: {reason}" in done.stdout
    assert "That is not allowed: allowed_skips.toml has no entry for it" in done.stdout
    # Skips by a marker, a fixture or a module are errors; the other tests still run.
    assert "1 failed, 1 passed, 1 xfailed, 3 errors" in done.stdout.splitlines()[-1]


def test_an_entry_is_about_tests_and_their_reason():
    text = ENTRY.format("test_x.py::test_a*", "^no (?P<isa>\\\\S+) here$", "instruction set: {isa}")
    (entry,) = skips.read(text)
    assert entry.is_about("tests_py/test_x.py::test_a[1]", "no mmx here")
    assert entry.is_about("test_x.py::test_a", "no mmx here")
    assert not entry.is_about("test_x.py::test_b", "no mmx here")
    assert not entry.is_about("test_x.py::test_a", "no mmx")
    assert skips.complaint_about("test_x.py::test_a", "no mmx here", [entry]) == ""
    complaint = skips.complaint_about("test_x.py::test_a", "no portable here", [entry])
    assert "only without [instruction set: portable]" in complaint


def test_every_entry_of_the_list_is_about_a_test_that_is_there():
    folder = skips.LIST.parent
    files = {str(path.relative_to(folder)) for path in folder.rglob("test_*.py")}
    for entry in skips.read():
        pattern = entry.tests.partition("::")[0]
        if not pattern.startswith("cpp/"):
            assert pattern == "*" or skips.fnmatch.filter(files, pattern), entry
        assert entry.why
        assert entry.needs
