# SPDX-License-Identifier: Apache-2.0
"""Processor, threads and memory of this machine, from the view of cpattn."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .. import _core, torch_guard
from .._arguments import count
from .._numa import ranges, read
from . import topology
from .cpu_name import cpu_name
from .finding import Finding
from .topology import size

_SECTION = "machine"
_SMALL_SHARED = 1 << 30  # containers have 64 MiB of /dev/shm by default


def findings(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report all findings of this module; `root` is the root of the system's files."""
    yield Finding(_SECTION, "processor", f"{cpu_name()}, {platform.machine()}")
    yield _instructions(environ)
    yield Finding(_SECTION, "compiled in", ", ".join(_core.compiled_isas()))
    if _core.amx_usable():
        yield _amx()
    yield from _threads(root, environ)
    yield from topology.findings(root, os.sched_getaffinity(0))
    yield _huge_pages(root)
    yield _shared_memory(root)


def _instructions(environ: Mapping[str, str]) -> Finding:
    name, chosen = "instructions", environ.get("CPATTN_ISA")
    here = ", ".join(_core.supported_isas())
    try:
        active = _core.active_isa()
    except ValueError as error:
        hint = f"unset CPATTN_ISA, or set it to one of {here}"
        return Finding(_SECTION, name, str(error), "broken", hint)
    if chosen:
        best = _core.supported_isas()[-1]
        state, text = ("note", f", not {best}, the best one here") if active != best else ("ok", "")
        return Finding(_SECTION, name, f"{active}, by CPATTN_ISA{text}", state)  # type: ignore[arg-type]
    why = "the best" if len(_core.supported_isas()) > 1 else "the only one"
    return Finding(_SECTION, name, f"{active}, {why} of {here}; CPATTN_ISA chooses another")


def _amx() -> Finding:
    if not _core.amx_palette_missing():
        return Finding(_SECTION, "AMX", "whole: also what other libraries look for is there")
    text = (
        "half-exposed: CPUID leaf 1DH is empty. cpattn does not need it; oneDNN, inside torch, "
        f"does: see torch below, and {torch_guard.VARIABLE}"
    )
    return Finding(_SECTION, "AMX", text, "warning")


def _threads(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    chosen = environ.get("CPATTN_NUM_THREADS")
    usable = sorted(os.sched_getaffinity(0))
    cpus = count(len(usable), "CPU")
    try:
        threads = _core.default_num_threads()
    except ValueError as error:
        hint = "unset CPATTN_NUM_THREADS, or set it to a number"
        yield Finding(_SECTION, "threads", str(error), "broken", hint)
        threads = 0
    else:
        by = ", by CPATTN_NUM_THREADS" if chosen else f", one for each of {cpus}"
        more = threads > len(usable)
        yield Finding(
            _SECTION,
            "threads",
            f"a call uses {threads}{by}" + f", which take turns on {cpus}" * more,
            "warning" if more else "ok",
            f"export CPATTN_NUM_THREADS={len(usable)}" * more,
        )
    total = os.cpu_count() or len(usable)
    yield Finding(_SECTION, "affinity", f"CPUs {ranges(usable)} of {total}")
    quota = cgroup_cpus(root)
    if quota is None:
        yield Finding(_SECTION, "CPU quota", "none")
    else:
        fewer = threads > max(quota, 1)
        yield Finding(
            _SECTION,
            "CPU quota",
            f"time of {quota:g} CPUs" + f" for {count(threads, 'thread')}, which will wait" * fewer,
            "warning" if fewer else "ok",
            f"export CPATTN_NUM_THREADS={max(int(quota), 1)}" * fewer,
        )


def cgroup_cpus(root: Path) -> float | None:
    """Return the CPU time that a container may use, in CPUs; None without a limit."""
    folder = root / "sys/fs/cgroup"
    files = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # of version 1
    text = read(folder / "cpu.max") or " ".join(read(folder / name) for name in files)
    with suppress(ValueError):  # "max" is no number
        quota, period = map(int, text.split())
        return quota / period if quota > 0 else None
    return None


def _huge_pages(root: Path) -> Finding:
    """Report on huge pages, which KV pools ask for; without them, small pages serve."""
    chosen = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if chosen and chosen[1] != "never":
        return Finding(_SECTION, "huge pages", f"{chosen[1]}: KV pools get them")
    why = "never" if chosen else "the system does not say"
    return Finding(_SECTION, "huge pages", f"{why}: KV pools have small pages", "note")


def _shared_memory(root: Path) -> Finding:
    """Report on /dev/shm, through which processes of a machine share memory."""
    try:
        answer = os.statvfs(root / "dev/shm")
    except OSError as error:
        return Finding(_SECTION, "/dev/shm", error.strerror or str(error), "warning")
    whole, free = (n * answer.f_frsize for n in (answer.f_blocks, answer.f_bavail))
    text = f"{size(whole)}, {size(free)} free"
    if free >= _SMALL_SHARED:
        return Finding(_SECTION, "/dev/shm", text)
    hint = "docker run --shm-size=2g ..., if engines in this container share tensors"
    return Finding(_SECTION, "/dev/shm", f"only {text}", "warning", hint)
