# SPDX-License-Identifier: Apache-2.0
"""The compiler of wheels is called with names that it knows, and everything else as it was."""

from __future__ import annotations

import re
import subprocess

import pytest

from support.places import ROOT

WRAPPER = ROOT / "cmake" / "zig" / "c++"


def translate(tmp_path, *options: str) -> list[str]:
    """What zig gets, one argument a line."""
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    zig.chmod(0o755)
    done = subprocess.run(
        [WRAPPER, *options], env={"ZIG": str(zig)}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("option", "translated"),
    [
        ("-march=x86-64-v2", "-march=x86_64_v2"),
        ("-march=armv8-a", "-mcpu=generic"),
        ("-march=armv8.2-a+bf16", "-mcpu=generic+v8_2a+bf16"),
    ],
)
def test_names_of_processors(tmp_path, option, translated):
    others = ["-O3", "-mavx512bf16", '-DTEXT="a b"', "a file.cc", ""]
    assert translate(tmp_path, *others, option, "-c") == ["c++", *others, translated, "-c"]
    assert translate(tmp_path) == ["c++"]


def test_every_processor_of_the_build_is_translated(tmp_path):
    """CMake would leave out the kernels, or end, for a name that zig refuses."""
    text = (ROOT / "cpp" / "CMakeLists.txt").read_text(encoding="utf-8")
    names = set(re.findall(r"-march=[\w.+-]+", text))
    assert len(names) >= 5
    for name in names:
        (_, translated) = translate(tmp_path, name)
        assert "-" not in translated.partition("=")[2]
