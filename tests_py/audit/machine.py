# SPDX-License-Identifier: Apache-2.0
"""Parts of this machine, found without the library, whose wrong answer must not excuse a skip."""

import ctypes
import functools
import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from audit import trace
from support.places import ROOT

# Instruction sets of each architecture, with the flags of /proc/cpuinfo that they need.
_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_BF16 = f"{_V4} avx512_bf16 avx512_vnni"
INSTRUCTION_SETS = {
    "x86_64": {
        "portable": "",
        "avx2": _V3,
        "avx512": _V4,
        "avx512bf16": _BF16,
        "amx-twin": f"{_BF16} avx512vbmi",
        "amx": f"{_BF16} avx512vbmi amx_tile amx_bf16 amx_int8",
    },
    "aarch64": {"portable": "", "neon": "asimd", "neonbf16": "asimd asimddp bf16"},
}.get(platform.machine(), {"portable": ""})


@functools.cache
def cpu_flags() -> frozenset[str]:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def class_of_machine() -> str:
    """Return processor and number of CPUs: machines of one class take about the same time."""
    said = dict(
        (part.strip() for part in line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    name = said.get("model name", platform.machine())
    kind = f" {said['cpu family']}.{said['model']}" if {"cpu family", "model"} <= set(said) else ""
    return f"{name}{kind}, {len(os.sched_getaffinity(0))} CPUs"


@functools.cache
def sanitizer() -> str:
    """Return the sanitizer whose library this process has loaded, or "" for none."""
    maps = Path("/proc/self/maps").read_text()  # ubsan may be loaded beside another
    return next((name for name in ("asan", "tsan", "ubsan") if f"/lib{name}.so" in maps), "")


def has_instruction_set(name: str) -> bool:
    if name not in INSTRUCTION_SETS or (name == "amx" and sanitizer()):
        return False  # builds with sanitizers have the twin instead
    return set(INSTRUCTION_SETS[name].split()) <= cpu_flags()


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


@functools.cache
def interpreter(version: str) -> str | None:
    """Return the command of a CPython such as 3.12, or 3.13t without the GIL, with its headers.

    It comes from pyenv or the path.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version.removesuffix('t')}.*/bin/python"))
    for command in [*map(str, reversed(installed)), shutil.which(f"python{version}")]:
        if command and _is_cpython(command, version):
            return command
    return None


def _is_cpython(command: str, version: str) -> bool:
    """Return whether a command works (a shim may fail), and has headers and venv."""
    code = (
        "import ensurepip, os, sys, sysconfig, venv\n"
        "assert os.path.exists(sysconfig.get_path('include') + '/Python.h')\n"
        "print('%s %d.%d%s' % (sys.implementation.name, *sys.version_info[:2], sys.abiflags))"
    )
    done = subprocess.run([command, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.split() == ["cpython", version]


def _has_network_namespaces() -> bool:
    """Return whether cables can connect namespaces; a container may forbid it even to root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"cpattn-probe-{os.getpid()}"
    with_cable = ["link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", "eth1"]
    try:
        return not any(
            subprocess.run(["ip", *command], capture_output=True, check=False).returncode
            for command in (["netns", "add", name], [*with_cable, "netns", name])
        )
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


# The mmap module has no name for this flag before Python 3.13.
MAP_NORESERVE = 0x4000


def _has_address_space(size: str) -> bool:
    """Return whether so many GiB can be reserved that are never touched, with any memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        mmap.mmap(-1, int(size.removesuffix(" GiB")) << 30, flags=flags).close()
    except OSError:
        return False
    return True


def has_release(requirement: str) -> bool:
    """Return whether a release of a distribution is installed, such as "torch==2.13.0"."""
    name, _, wanted = requirement.partition("==")
    try:
        return version(name).partition("+")[0] == wanted  # 2.13.0+cpu counts as 2.13.0
    except PackageNotFoundError:
        return False


def has_file(name: str) -> bool:
    return (ROOT / name).is_file()


def wheel_of_sglang(version: str) -> Path | None:
    folder = Path(os.environ.get("CPATTN_SGLANG_WHEELS") or "/nowhere")
    return next(folder.glob(f"sglang-{version}-*.whl"), None)


_KINDS: dict[str, Callable[[str], bool]] = {
    "address space": _has_address_space,
    "command": lambda name: shutil.which(name) is not None,
    "cpus": lambda ids: {int(i) for i in ids.split(",")} <= os.sched_getaffinity(0),
    "file": has_file,
    "instruction set": has_instruction_set,
    "interpreter": lambda version: interpreter(version) is not None,
    "library": has_library,
    "machine": lambda name: platform.machine() == name,
    "never": lambda _: False,  # the run itself lacks it, on every machine
    "network": lambda _: _has_network_namespaces(),
    "package": lambda name: importlib.util.find_spec(name) is not None,
    "python below": lambda version: sys.version_info < tuple(map(int, version.split("."))),
    "release": has_release,
    "trace": lambda _: trace.find() is not None,
    "variable": lambda name: bool(os.environ.get(name)),
    "wheel of sglang": lambda version: wheel_of_sglang(version) is not None,
}


@functools.cache
def has(need: str) -> bool:
    """Return whether this machine meets the need that the list of skips calls "<kind>: <name>"."""
    kind, colon, name = need.partition(": ")
    if not colon or kind not in _KINDS:
        raise ValueError(f"{need!r} is not '<kind>: <name>' with a kind of {sorted(_KINDS)}")
    return _KINDS[kind](name)
