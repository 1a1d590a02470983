# SPDX-License-Identifier: Apache-2.0
"""The sdist has what builds it and nothing else; `make sdist` compiles it as well."""

from __future__ import annotations

import subprocess
import sys
import tarfile

import build_sdist
import pytest

from support.places import ROOT


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("scikit_build_core")
    return build_sdist.build(tmp_path_factory.mktemp("sdist"))


def test_its_files(sdist):
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    assert build_sdist.wrong_names(names) == []
    there = {name.partition("/")[2] for name in names}
    listed = subprocess.run(
        ["git", "ls-files", "cpp", "python", "cmake"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    assert set(listed) <= there
    assert {"cpp/CMakeLists.txt", "python/cpattn/py.typed", "cmake/zig/c++"} <= there


def test_names_that_do_not_belong_there_or_are_missing():
    top = [f"cpattn-1.0/{entry}" for entry in build_sdist.TOP]
    wrong = [
        "build/release/build.ninja", "docs/support.md", "python/cpattn/_core.cpython-311.so",
        "python/cpattn/__pycache__/cli.cpython-311.pyc", "cpp/base/cpu.cc.o", "mkdocs.yml",
    ]  # fmt: skip
    wrong = [f"cpattn-1.0/{name}" for name in wrong]
    assert build_sdist.wrong_names([*top, *wrong]) == wrong
    assert build_sdist.wrong_names([x for x in top if "LICENSE" not in x]) == ["LICENSE"]


@pytest.mark.slow
def test_cmake_finds_all_sources_in_it(sdist, tmp_path):
    """It is in no checkout, and CMake refuses a list with a file that is not there."""
    source = build_sdist.unpack(sdist, tmp_path)
    done = subprocess.run(
        [
            "cmake", "-S", source, "-B", tmp_path / "build", "-G", "Ninja",
            "-DCPATTN_TESTS=OFF", f"-DPython_EXECUTABLE={sys.executable}",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Build files have been written" in done.stdout
