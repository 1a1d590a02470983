# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects come out as `expected.toml` says, and so does their page."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from requirements import extra

from audit import records
from outside import archive, page, suite
from outside.suite import Case, InexpressibleError
from support.children import path_with
from support.places import ROOT, TESTS

EXPECTED = suite.read_expected()
#: Suites of kernels take seconds, those of a specification none.
BY_TIME = [
    pytest.param(name, marks=() if "onnx" in name else pytest.mark.slow) for name in EXPECTED
]


@pytest.mark.parametrize("name", BY_TIME)
def test_as_many_cases_pass_as_are_expected(children, name):
    for absent in suite.missing(EXPECTED[name]):
        pytest.skip(absent)
    records.note("suite", name, archive.release(EXPECTED[name]))
    # Suites change flags of torch and of warnings, so that each has a process of its own.
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


def test_cases_of_another_file_are_refused():
    entry = {"needs": ["pytest==0"], "source": "pytest/__init__.py", "sha256": "0"}
    with pytest.raises(ValueError, match=r"not that of expected\.toml"):
        suite.check_source(entry)


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """The entry of an archive that a server has, under a root where it is not."""
    monkeypatch.setattr(archive, "ROOT", tmp_path)
    served = tmp_path / "some-1.0.tar.gz"
    with tarfile.open(served, "w:gz") as opened:
        opened.add(__file__, "some-1.0/tests/test_some.py")
    digest = hashlib.sha256(served.read_bytes()).hexdigest()
    return {"source": served.as_uri(), "sha256": digest, "needs": []}


def test_texts_are_read_out_of_an_archive_that_was_fetched(packed, tmp_path):
    archive.fetch(packed)
    assert [path.name for path in (tmp_path / "build/outside").iterdir()] == ["some-1.0.tar.gz"]
    read = archive.read(packed, "tests/test_some.py")
    assert read == {"tests/test_some.py": Path(__file__).read_text()}
    with pytest.raises(ValueError, match=r"has no tests/test_other\.py"):
        archive.read(packed, "tests/test_other.py", "tests/test_some.py")


def test_an_archive_with_another_hash_is_not_kept(packed, tmp_path):
    with pytest.raises(OSError, match=r"not that of expected\.toml"):
        archive.fetch(packed | {"sha256": "0"})
    assert not (tmp_path / "build").exists()


def test_an_archive_that_cannot_be_had_is_named(packed, monkeypatch, capsys):
    entry = packed | {"source": "https://localhost:1/some-1.0.tar.gz"}
    monkeypatch.setattr(archive, "entries", lambda: {"some": entry})
    assert archive.release(entry) == "some==1.0"
    assert archive.main() == 1
    assert capsys.readouterr().out.startswith("Not here: build/outside/some-1.0.tar.gz: ")


def test_cases_are_those_that_pytest_would_make():
    pytest.importorskip("torch")
    from outside import pytest_cases

    @pytest.mark.parametrize(("a", "b"), [(1, 2), pytest.param(3, 4)])
    @pytest.mark.parametrize("c", range(20))
    def test_some(a, b, c):
        raise AssertionError(f"{a}{b}{c}")

    @pytest.mark.skipif(True, reason="never")
    def test_other():
        pass

    module = SimpleNamespace(test_some=test_some, test_other=test_other)
    every, sample, again = (
        [case.name for case in pytest_cases.cases(module, vars(module), every)]
        for every in (True, False, False)
    )
    assert len(every) == 40
    assert "test_some(a=3, b=4, c=19)" in every
    assert len(sample) == pytest_cases.SAMPLE
    assert sample == again
    assert set(sample) < set(every)
    assert suite.run(pytest_cases.cases(module, vars(module), True)).counts()["failed"] == 40
