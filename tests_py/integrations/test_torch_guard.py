# SPDX-License-Identifier: Apache-2.0
"""The torch guard: the machines that need it, and its changes of the environment."""

import os
import platform
import re
import sys
import types
from pathlib import Path

import pytest

from cpattn import _core, torch_guard


@pytest.fixture
def machine(monkeypatch):
    clean = {name: value for name, value in os.environ.items() if name != torch_guard.VARIABLE}
    monkeypatch.setattr(os, "environ", clean)
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def set_to(*, amx_usable, palette_missing, has_avx512_fp16=True):
        monkeypatch.setattr(_core, "amx_usable", lambda: amx_usable)
        monkeypatch.setattr(_core, "amx_palette_missing", lambda: palette_missing)
        monkeypatch.setattr(_core, "has_avx512_fp16", lambda: has_avx512_fp16)

    return set_to


@pytest.mark.parametrize("has_avx512_fp16", [True, False])
def test_a_broken_machine_gets_the_variable_and_one_line(machine, has_avx512_fp16):
    limit = "AVX512_CORE_FP16" if has_avx512_fp16 else "AVX512_CORE_BF16"
    machine(amx_usable=True, palette_missing=True, has_avx512_fp16=has_avx512_fp16)
    message = torch_guard.prepare()
    assert os.environ[torch_guard.VARIABLE] == limit
    assert f"{torch_guard.VARIABLE}={limit}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("amx_usable", "palette_missing"), [(False, True), (True, False), (False, False)]
)
def test_a_sound_machine_is_left_alone(machine, amx_usable, palette_missing):
    machine(amx_usable=amx_usable, palette_missing=palette_missing)
    assert torch_guard.prepare() is None
    assert torch_guard.VARIABLE not in os.environ


def test_the_users_own_setting_stays_and_too_late_is_a_warning(machine, monkeypatch):
    machine(amx_usable=True, palette_missing=True)
    os.environ[torch_guard.VARIABLE] = "AVX2"
    assert torch_guard.prepare() is None
    assert os.environ.pop(torch_guard.VARIABLE) == "AVX2"
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    with pytest.warns(RuntimeWarning, match="after torch was imported"):
        torch_guard.prepare()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="compares with the flags that Linux prints on x86-64",
)
def test_what_the_core_reads_agrees_with_the_kernel():
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(flags.group(1).split())
    assert _core.has_avx512_fp16() == ("avx512_fp16" in flags)
    if _core.amx_usable():
        assert {"amx_bf16", "amx_int8", "amx_tile"} <= flags
    if "amx_tile" not in flags:
        assert not _core.amx_usable()
        assert _core.amx_palette_missing()
