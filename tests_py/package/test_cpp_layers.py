# SPDX-License-Identifier: Apache-2.0
"""C++ sources include only what cpp/layers.toml allows, and each folder says what is in it."""

import re
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from support.places import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

CPP = ROOT / "cpp"
HEADERS = CPP / "include" / "cpattn"
LIBRARIES = {"Eigen", "pybind11"}
# A file built with special -m flags may include these alone: they have no inline functions.
KERNEL_HEADERS = {"stdint.h", "stddef.h", "string.h", "immintrin.h", "arm_neon.h"}
MOST_FILES = 21  # sources in a folder

FILES = sorted(path for path in CPP.rglob("*") if path.suffix in {".h", ".cc"})


@dataclass(frozen=True)
class Layers:
    """The table of cpp/layers.toml; paths are written as in #include lines."""

    table: dict[str, Any]

    def layer_of(self, header: str) -> str:
        found = [name for name, paths in self.table["headers"].items() if header in paths]
        assert len(found) == 1, f"{header} is in {found} of layers.toml"
        return found[0]

    def headers_for(self, path: str) -> set[str]:
        if path.startswith("include/"):
            own = self.layer_of(path.removeprefix("include/cpattn/"))
            return {own, *self.table["header_layers"][own]}
        return set(self._floor(path)["headers"])

    def _floor(self, path: str) -> dict[str, Any]:
        return next(floor for floor in self.table["floor"] if floor["name"] == path.split("/")[0])

    def complaints(self, path: str, text: str) -> list[str]:
        """List what the file at a path below cpp includes although it may not."""
        includes = re.findall(r'#include "([^"]+)"', text)
        libraries = LIBRARIES & {
            name.split("/")[0] for name in re.findall(r"#include <([^>]+)>", text)
        }
        found = [name for name in includes if not self._allows(path, name)]
        allowed = (
            set() if path.startswith("include/") else set(self._floor(path).get("libraries", ()))
        )
        return found + sorted(libraries - allowed)

    def _allows(self, path: str, included: str) -> bool:
        floor, *rest = included.split("/")
        if floor == "cpattn":
            ok = self.layer_of("/".join(rest)) in self.headers_for(path)
        elif path.startswith("include/"):
            return False
        elif floor == path.split("/")[0]:
            ok = True
        else:
            ok = floor in self._floor(path).get("floors", ()) and not included.endswith("-inl.h")
        return ok and self._room_allows(path, included)

    def _room_allows(self, path: str, included: str) -> bool:
        own, other = room_of(path), room_of(included)
        rooms = self.table["rooms"]
        if path.startswith("kernels/"):
            rooms = self.table["kernel_rooms"]
        elif own not in rooms or included.startswith("kernels/") or other not in rooms:
            return True  # the floor has no rooms, or its rooms share the included file
        return other == own or other == "base" or other in rooms[own]


def room_of(path: str) -> str:
    """Return "sparse" for "ops/sparse/topk.cc" and "[include/]cpattn/sparse/topk.h".

    It is "sparse/amx" for "kernels/sparse/amx/indexer-inl.h".
    """
    return "/".join(path.removeprefix("include/").split("/")[1:-1])


LAYERS = Layers(tomllib.loads((CPP / "layers.toml").read_text()))


def name_of(path: Path) -> str:
    return str(path.relative_to(CPP))


def test_includes_and_length():
    for path in FILES:
        text = path.read_text()
        assert LAYERS.complaints(name_of(path), text) == [], path
        assert text.count("\n") <= 400, path
        if "kernels" in path.parts:
            assert set(re.findall(r"#include <([^>]+)>", text)) <= KERNEL_HEADERS, path


def test_one_file_calls_linux():
    found = [
        name_of(path)
        for path in FILES
        if re.search(
            r"#include <(linux/|sys/(syscall|auxv|eventfd|epoll|prctl)\.h)", path.read_text()
        )
    ]
    assert found == ["base/system_linux.cc"]


def test_every_header_has_a_layer():
    listed = [path for paths in LAYERS.table["headers"].values() for path in paths]
    assert sorted(listed) == sorted(str(path.relative_to(HEADERS)) for path in HEADERS.rglob("*.h"))


def test_every_folder_has_a_line():
    floors = {path.name for path in CPP.iterdir() if path.is_dir()} - {"include"}
    assert {floor["name"] for floor in LAYERS.table["floor"]} == floors
    kernels = CPP / "kernels"
    folders = [path for path in kernels.rglob("*") if path.is_dir()]
    assert {str(path.relative_to(kernels)) for path in folders} == set(LAYERS.table["kernel_rooms"])
    kernel_rooms = {path.name for path in folders if path.parent == kernels}
    rooms = {path.name for path in [*HEADERS.iterdir(), *CPP.glob("*/*")] if path.is_dir()}
    assert rooms == set(LAYERS.table["rooms"]) | kernel_rooms | {"cpattn", "arguments", "include"}


def test_rooms_have_no_circles():
    for rooms in ("rooms", "kernel_rooms"):
        TopologicalSorter(LAYERS.table[rooms]).prepare()  # raises CycleError, which names them


def test_a_folder_is_small_and_says_what_is_in_it():
    for folder in {path.parent for path in (*FILES, *ROOT.glob("tests_cpp/*/*.cc"))}:
        assert sum(path.suffix in {".h", ".cc"} for path in folder.iterdir()) <= MOST_FILES, folder
        readme = (folder if folder.is_relative_to(CPP) else ROOT / "tests_cpp") / "README.md"
        text = readme.read_text()
        assert text.startswith(f"# {readme.parent.relative_to(ROOT)}\n")
        for name in re.findall(r"`([\w/-]+\.(?:h|cc))`", text):
            assert (readme.parent / name).exists(), f"{readme} names {name}"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("meta/attention/attention_plan.cc", '#include "cpattn/base/parallel.h"'),
        ("meta/attention/attention_plan.cc", '#include "cpattn/base/tensor_view.h"'),
        ("meta/attention/attention_plan.cc", '#include "cpattn/attention/paged_attention.h"'),
        ("meta/attention/attention_plan.cc", '#include "cpattn/transfer/kv_layout.h"'),
        ("include/cpattn/base/trace.h", '#include "cpattn/base/tensor_view.h"'),
        ("include/cpattn/attention/attention_plan.h", '#include "cpattn/base/parallel.h"'),
        ("include/cpattn/base/check.h", '#include "ops/base/rows.h"'),
        ("ops/sparse/topk.cc", '#include "ops/npu/fia_mask.h"'),
        ("ops/sparse/topk.cc", '#include "kernels/sparse/topk-inl.h"'),
        ("ops/sparse/topk.cc", '#include "bindings/gil.h"'),
        ("ops/sparse/topk.cc", "#include <pybind11/pybind11.h>"),
        ("c/topk.cc", '#include "ops/sparse/slot_rows.h"'),
        ("c/topk.cc", '#include "cpattn/reference/reference.h"'),
        ("kernels/vector/avx2-inl.h", '#include "kernels/engines/gemm-inl.h"'),
        ("kernels/engines/gemm-inl.h", '#include "cpattn/base/check.h"'),
        ("reference/rows.h", '#include "cpattn/sparse/topk.h"'),
        ("base/trace.cc", "#include <Eigen/Dense>"),
    ],
)
def test_a_break_is_found(path, line):
    assert (CPP / path).exists()
    assert len(LAYERS.complaints(path, line)) == 1


def test_each_type_has_a_name_of_its_own():
    """The linker takes two types of one name in one namespace for one, and mixes destructors."""
    names = [
        name
        for floor in ("include", "base", "meta", "ops", "reference")
        for path in sorted((ROOT / "cpp" / floor).rglob("*.h"))
        for name in re.findall(
            r"^(?:struct|class|enum class|union) (\w+)[^;\n]*$", path.read_text(), re.MULTILINE
        )
    ]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))
