# SPDX-License-Identifier: Apache-2.0
"""Parts of this machine are found without the library, which must agree."""

from __future__ import annotations

import sys

import pytest

from audit import machine, trace
from cpattn import supported_isas


def test_the_library_finds_the_instruction_sets_that_the_processor_lists():
    expected = {name for name in machine.INSTRUCTION_SETS if machine.has_instruction_set(name)}
    assert set(supported_isas()) == expected


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        ("address space: 1 GiB", True),
        ("address space: 1000000 GiB", False),
        ("command: sh", True),
        ("command: cpattn-nonsense", False),
        ("cpus: 0,100000", False),
        ("instruction set: portable", True),
        ("instruction set: mmx", False),
        ("interpreter: 2.0", False),
        ("library: libc.so.6", True),
        ("library: libnonsense.so.1", False),
        ("machine: z80", False),
        ("never: anything", False),
        ("package: numpy", True),
        ("package: cpattn_nonsense", False),
        ("python below: 3.10", False),
        ("python below: 4.0", True),
        ("release: numpy==0.0.1", False),
        ("release: cpattn-nonsense==1.0", False),
        ("variable: CPATTN_NONSENSE", False),
        ("variable: PATH", True),
        ("wheel of sglang: 0.0.0", False),
    ],
)
def test_what_a_machine_has(need, expected):
    assert machine.has(need) is expected


def test_a_need_of_no_known_kind_is_an_error():
    with pytest.raises(ValueError, match="'moon: full' is not '<kind>: <name>'"):
        machine.has("moon: full")


def test_an_interpreter_is_one_that_extensions_can_be_built_for(tmp_path, monkeypatch):
    """A shim of a version that is not there is none, nor is one that says it is another."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    shim, other = tmp_path / "python3.98", tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    other.symlink_to(sys.executable)
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.interpreter("3.98") is None
    assert machine.interpreter("3.99") is None


def test_the_real_trace_lies_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.delenv("CPATTN_TRACE", raising=False)
    assert trace.find() is None
    file = tmp_path / "trace"
    file.write_text("x")
    monkeypatch.setenv("CPATTN_TRACE", str(file))
    assert trace.find() == file
    assert trace.sha256(file).startswith("2d711642b726b044")
