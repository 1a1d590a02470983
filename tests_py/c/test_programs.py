# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/how_to/from_c.md with libcpattn, both from its build and installed."""

import os
import shutil
import subprocess

import pytest

from audit import machine
from support.c import library as c_library
from support.pages import blocks_in
from support.places import ROOT
from support.time_limits import PATIENCE

BLOCKS = blocks_in(ROOT / "docs" / "how_to" / "from_c.md")
FILES = {block.title: block.text for block in BLOCKS if "." in block.title}
C99 = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
AGAINST_BUILD = [f"-I{c_library.HEADER.parent}"]


def printed_by(program: str) -> str:
    """Return the output that the page shows after the program."""
    at = next(i for i, block in enumerate(BLOCKS) if block.title == program)
    return next(block.text for block in BLOCKS[at:] if block.is_output)


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def run(folder, children):
    def run(*command, **environment):
        done = children.run(command, cwd=folder, env={**os.environ, **environment})
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def library():
    """Return the folder of the library, built without sanitizer, and its path for the loader."""
    folder = c_library.build_folder()
    if machine.sanitizer():
        pytest.skip("programs without sanitizers cannot load a library with one")
    return folder


def flags_of(library) -> list[str]:
    return [f"-L{library}", "-lcpattn", f"-Wl,-rpath,{library}"]


@pytest.mark.parametrize("program", ["attention.c", "digest.c"])
def test_in_c(run, library, program):
    run(*C99, *AGAINST_BUILD, program, "-o", "program", *flags_of(library))
    assert run("./program") == printed_by(program)


def test_in_cpp(run, library, folder):
    (folder / "main.cc").write_text(
        '#include "plan.h"\n#include <cstdio>\n'
        "int main() {\n"
        "  cpattn_batch batch;\n  cpattn_attention_shape shape;\n"
        "  cpattn_batch_init(&batch, sizeof batch);\n"
        "  cpattn_attention_shape_init(&shape, sizeof shape);\n"
        "  try { make_plan(batch, shape); }\n"
        "  catch (const std::exception& error) { std::puts(error.what()); }\n"
        "}\n"
    )
    run("c++", "-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic", *AGAINST_BUILD, "main.cc",
        "-o", "main", *flags_of(library))  # fmt: skip
    assert run("./main") == "plan_attention: q_lens must be a tensor, got NULL\n"


def test_in_rust(run, library):
    if shutil.which("rustc") is None:
        pytest.skip("no rustc here")
    run("rustc", "-O", "-D", "warnings", "attention.rs", "-L", library,
        "-C", f"link-arg=-Wl,-rpath,{library}")  # fmt: skip
    assert run("./attention") == printed_by("attention.rs")


def test_in_go(run, library, folder):
    if shutil.which("go") is None:
        pytest.skip("no go here")
    (folder / "cpattn.pc").write_text(
        f"Name: cpattn\nDescription: x\nVersion: 0\nCflags: {AGAINST_BUILD[0]}\n"
        f"Libs: {' '.join(flags_of(library))}\n"
    )
    environment = {"PKG_CONFIG_PATH": str(folder), "CGO_LDFLAGS_ALLOW": ".*", "GO111MODULE": "off"}
    assert run("go", "run", "attention.go", **environment) == printed_by("attention.go")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    build = c_library.build_folder().parents[1]
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run(
        ["cmake", "--install", build, "--prefix", prefix], check=True, capture_output=True
    )
    return prefix


@pytest.mark.parametrize("how", ["By pkg-config", "By pkg-config, static", "By CMake"])
def test_installed(run, library, prefix, how):
    if "pkg-config" in how and shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config here")
    commands = next(block.text for block in BLOCKS if block.title == how)
    (lib,) = {path.parents[1].name for path in prefix.glob("lib*/pkgconfig/cpattn.pc")}
    for documented, here in (("/opt/cpattn/lib", prefix / lib), ("/opt/cpattn", prefix)):
        commands = commands.replace(documented, str(here))
    printed = run("sh", "-ec", commands, LD_LIBRARY_PATH="")
    assert printed.endswith(printed_by("attention.c"))


@pytest.mark.slow
@pytest.mark.timeout(20 * PATIENCE)
def test_it_is_built_without_python(children):
    """CMake finds no interpreter, and no Eigen, which comes with Python.

    The folder stays, so that compiled files are not compiled again; ccache has the rest.
    """
    folder = ROOT / "build" / "c-alone"
    options = [f"-DCPATTN_{name}=OFF" for name in ("PYTHON", "TESTS", "AMX_TWIN")]
    options += [
        f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("Python", "Eigen3", "pybind11")
    ]
    options += ["-DCPATTN_WERROR=ON", "-DCPATTN_ISAS=best"]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    (folder / "cpp" / "c" / "libcpattn.so").unlink(missing_ok=True)
    for command in (
        ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "-j", "2"],
    ):
        done = children.run(command, timeout=10 * PATIENCE)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr}"
    assert (folder / "cpp" / "c" / "libcpattn.so").exists()
