# SPDX-License-Identifier: Apache-2.0
"""The name of the processor, as results of benchmarks and replays have it."""

from __future__ import annotations

import platform

import pytest

from cpattn import _machine


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: A CPU @ 2 GHz\n\nmodel name\t: another\n", "A CPU @ 2 GHz"),
        ("processor : 0\nCPU implementer : 0x41\n", platform.machine()),  # as on Arm
        (None, platform.machine()),
    ],
    ids=["x86-64", "aarch64", "no such file"],
)
def test_cpu_name(monkeypatch, tmp_path, text, name):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(_machine, "_CPUINFO", file)
    assert _machine.cpu_name() == name
