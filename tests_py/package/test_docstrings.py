# SPDX-License-Identifier: Apache-2.0
"""Every public function and class says what it takes, returns and raises, with an example."""

import doctest
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import cpattn

ROOMS = [
    *(f"cpattn{room}" for room in (
        "", ".captures", ".context_parallel.halo", ".context_parallel.vllm_0_32", ".kv", ".npu",
        ".profiling", ".reference", ".scheduling", ".sparse", ".sparse.sglang_0_5_23", ".transfer",
        ".transfer.sglang_0_5_23",
    )),
    *(f"cpattn.integrations.{name}" for name in (
        "flash_attn", "flashinfer", "mooncake", "nixl", "sglang", "torch_npu", "torch_threads",
        "transformers", "vllm",
    )),
    "cpattn.distributed", "cpattn_lab.cost_model", "cpattn_lab.traffic", "cpattn_proof",
]  # fmt: skip
# These first words of summaries are no verbs.
NO_VERBS = {
    "A", "An", "As", "How", "One", "The", "What", "When", "Where", "Whether", "Which", "Who"
}  # fmt: skip


def public() -> dict[str, Any]:
    found = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                found[f"{value.__module__}.{value.__name__}"] = value
    return found


PUBLIC = public()
FUNCTIONS = {name: value for name, value in PUBLIC.items() if not inspect.isclass(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}


def sections(doc: str) -> dict[str, str]:
    """Return the sections of a docstring by title; the text before the first is ""."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", doc, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters_of(call: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:  # functions of the core have no signature from pybind11
        return []
    return [
        name
        for name, parameter in parameters.items()
        if name != "self"
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def described(section: str) -> set[str]:
    """Return the names at the left of a Parameters section."""
    names: set[str] = set()
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names |= {name.strip(" *") for name in line.partition(" : ")[0].split(",")}
    return names


def doc_of(value: Any) -> str:
    """Return the docstring without the signature that pybind11 puts in front."""
    doc = inspect.getdoc(value) or ""
    return re.sub(r"^\w+\(.*\) -> .*\n+", "", doc) if inspect.isbuiltin(value) else doc


def first_word(doc: str) -> str:
    return doc.split()[0].strip("`.,:")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_described(name):
    call = FUNCTIONS[name]
    doc = doc_of(call)
    found = sections(doc)
    assert first_word(doc) not in NO_VERBS
    assert re.fullmatch(r"[A-Z][a-z]+", first_word(doc))
    names = parameters_of(call)
    assert set(names) <= described(found.get("Parameters", ""))
    if inspect.get_annotations(call).get("return") != "None" and names:
        assert (found.get("Returns") or found.get("Yields", "")).strip()
    if names:
        assert found.get("Raises", "").strip()
    assert ">>>" in found.get("Examples", "")


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_described(name):
    kind = CLASSES[name]
    doc = inspect.getdoc(kind) or ""
    assert doc.strip()
    methods = {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, functools.cached_property)))
    }
    missing = [name for name, value in methods.items() if not (inspect.getdoc(value) or "").strip()]
    assert not missing
    if issubclass(kind, (enum.Enum, BaseException)):
        return
    assert ">>>" in doc or getattr(kind, "_is_protocol", False)
    if "__init__" in vars(kind):
        found = sections(doc)  # fields of a dataclass are its attributes
        text = found.get("Parameters", "") + found.get("Attributes", "")
        assert set(parameters_of(kind)) <= described(text)


def test_all_rooms_are_looked_at():
    assert len(PUBLIC) > 80
    assert "cpattn.distributed.context_parallel.ContextParallel" in CLASSES
    rooms = {room.split(".")[1] for room in ROOMS[1:] if room.startswith("cpattn.")}
    assert rooms <= set(dir(cpattn))


@pytest.mark.parametrize(
    "name", [name for name, value in PUBLIC.items() if name.startswith("cpattn._core.")]
)
def test_examples_of_the_core_run(name):
    """The modules of the Python sources run their own examples."""
    test = doctest.DocTestParser().get_doctest(doc_of(PUBLIC[name]), {}, name, None, None)
    assert doctest.DocTestRunner().run(test).failed == 0
