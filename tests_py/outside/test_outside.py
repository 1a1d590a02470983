# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects, and their page, have the results in `expected.toml`."""

import os
import re
import sys
from pathlib import Path

import pytest
from requirements import extra

from audit import records
from outside import archive, page, suite
from outside.suite import Case, InexpressibleError
from support.children import path_with
from support.places import ROOT, TESTS

EXPECTED = suite.read_expected()
#: Suites of kernels take seconds, suites of a specification almost no time.
BY_TIME = [
    pytest.param(name, marks=() if "onnx" in name else pytest.mark.slow) for name in EXPECTED
]


@pytest.mark.parametrize("name", BY_TIME)
def test_as_many_cases_pass_as_are_expected(children, name):
    for absent in suite.missing(EXPECTED[name]):
        pytest.skip(absent)
    records.note("suite", name, archive.release(EXPECTED[name]))
    # Suites change flags of torch and of warnings, so each has its own process.
    command = [sys.executable, "-m", "outside", name]
    done = children.run(command, env=os.environ | {"PYTHONPATH": path_with(TESTS)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_the_expected_counts():
    text = page.PAGE.read_text()
    table = text.partition(page.BEGIN)[2].partition(page.END)[0].strip()
    assert table == page.markdown(EXPECTED).strip(), "python -m outside --write"


def test_what_is_counted_is_what_pip_installs():
    torch = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needed = {release for entry in EXPECTED.values() for release in entry["needs"]}
    assert needed <= {*extra("outside"), torch[1]}


def raising(error):
    def check():
        raise error

    return check


CASES = [
    Case("right", lambda: None),
    Case("right, but for lse", lambda: "lse"),
    Case("wrong", raising(AssertionError("off by 2"))),
    Case("refused", raising(ValueError("no such dtype"))),
    Case("other", raising(InexpressibleError("dropout"))),
]


def test_a_case_counts_by_what_came_out():
    result = suite.run(CASES)
    assert set(result.failed) == {"wrong", "refused"}
    assert "off by 2" in result.failed["wrong"]
    counts = {"passed": 2, "failed": 2}
    counts |= {"not_expressible": {"dropout": 1}, "not_compared": {"lse": 1}}
    assert result.counts() == counts
    assert suite.complaints("some", result, counts) == []
    (line,) = suite.complaints("some", result, counts | {"passed": 1})
    assert line == "some: passed is 2, and expected.toml expects 1"
    origin = {"title": "Some", "needs": ["some==1.0"], "source": "some/tests.py"}
    cells = ("Some", "some 1.0", "5", "4", "2", "2", "1 dropout", "1 lse")
    assert page.rows({"some": counts | origin}) == [cells]
    assert page.aligned([cells]).splitlines()[1].startswith("Some   some 1.0  5")


def test_files_with_another_hash_are_refused(tmp_path, monkeypatch):
    entry = {"needs": ["pytest==0"], "source": "pytest/__init__.py", "sha256": "0"}
    with pytest.raises(ValueError, match=r"not that of expected\.toml"):
        suite.check_source(entry)
    monkeypatch.setattr(archive, "ROOT", tmp_path)
    with pytest.raises(OSError, match=r"not that of expected\.toml"):
        archive.fetch(entry | {"source": Path(__file__).as_uri()})
    assert not [*tmp_path.iterdir()]
