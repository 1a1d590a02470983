# SPDX-License-Identifier: Apache-2.0
"""Sockets, cores and NUMA nodes of the CPUs that this process may use, and its memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from .._arguments import count
from .._numa import nodes_of, numbers_of, ranges, read
from .finding import Finding

_SECTION = "machine"
#: Limits of the two cgroup versions; version 1 uses a huge number for no limit.
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_CPUS = r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*"

#: Variables by which engines bind their ranks: sets of CPUs separated by |.
ENGINE_CPUS = {"vLLM": "VLLM_CPU_OMP_THREADS_BIND", "sglang": "SGLANG_CPU_OMP_THREADS_BIND"}


def findings(
    root: Path, usable: Collection[int], environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Report all findings on the CPUs `usable`; `root` as in `machine.findings`."""
    yield _cores(root, usable)
    yield _numa(root, usable)
    for engine, variable in ENGINE_CPUS.items():
        if re.match(r"\d", environ.get(variable, "")):  # not a word such as auto
            yield _engine_cpus(root, usable, engine, environ[variable])
    yield _memory(root)


def size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 1 << 30 else f"{number / 2**20:.0f} MiB"


def cores_of(root: Path, cpus: Collection[int]) -> list[list[int]]:
    """Group CPUs by core, in ascending order; each CPU is a core if the system tells none."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(_siblings(root, cpu) or str(cpu), []).append(cpu)
    return list(cores.values())


def _siblings(root: Path, cpu: int) -> str:
    return read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")


def _cores(root: Path, usable: Collection[int]) -> Finding:
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in usable]
    sockets = {read(folder / "physical_package_id") for folder in folders}
    cores = {_siblings(root, cpu) for cpu in usable}
    if "" in sockets | cores or not folders:
        return Finding(_SECTION, "cores", "the system does not say")
    text = f"{count(len(cores), 'core')} of {count(len(sockets), 'socket')}"
    if len(cores) == len(usable):
        return Finding(_SECTION, "cores", text)
    text += f" are the {len(usable)} CPUs: threads of a call share cores"
    hint = f"export CPATTN_NUM_THREADS={len(cores)}, for one thread a core"
    return Finding(_SECTION, "cores", text, "note", hint)


def _numa(root: Path, usable: Collection[int]) -> Finding:
    number = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if not number:
        return Finding(_SECTION, "NUMA", "the system does not say")
    own = list(nodes_of(root, usable))
    whole = count(number, "node")
    if number == 1 or len(own) == 1:
        return Finding(_SECTION, "NUMA", whole if number == 1 else f"node {own[0]} of {whole}")
    text = f"{len(own)} of {whole}: a call whose threads are on several reads "
    hint = f"a process for each node: cpattn bind --ranks {len(own)}"
    return Finding(_SECTION, "NUMA", f"{text}memory of the others", "note", hint)


def _engine_cpus(root: Path, usable: Collection[int], engine: str, text: str) -> Finding:
    """Judge the CPUs that a variable assigns to each rank of an engine."""
    name, parts = f"{engine} ranks", text.split("|")
    known = all(re.fullmatch(_CPUS, part) for part in parts)
    groups = [numbers_of(part) for part in parts] if known else []
    every = set().union(*groups)
    told = f"{count(len(parts), 'rank')} on CPUs {text}"
    nodes = [set(nodes_of(root, group)) for group in groups]
    if not known or not all(groups):
        problem = "a rank has no CPUs, or not as ranges such as 0-31,64-95"
    elif not every <= set(usable):
        problem = f"CPUs {ranges(every - set(usable))} are not for this process"
    elif len(every) < sum(map(len, groups)):
        problem = "ranks share CPUs"
    elif len(cores_of(root, every)) < len(every):
        problem = "threads share cores"
    elif max(map(len, nodes)) > 1 and sum(map(len, nodes)) > len(set().union(*nodes)):
        problem = "a rank is on parts of several NUMA nodes"
    else:
        return Finding(_SECTION, name, told)
    hint = f"cpattn bind --ranks {len(parts)} says which are better"
    return Finding(_SECTION, name, f"{told}: {problem}", "warning", hint)


def _memory(root: Path) -> Finding:
    kibibytes = re.search(r"^MemTotal:\s*(\d+) kB$", read(root / "proc/meminfo"), re.MULTILINE)
    if not kibibytes:
        return Finding(_SECTION, "memory", "the system does not say")
    total = int(kibibytes[1]) << 10
    limits = (read(root / "sys/fs/cgroup" / name) for name in _MEMORY_LIMITS)
    limit = min([total, *(int(text) for text in limits if text.isdecimal())])
    text = size(total) if limit == total else f"{size(limit)} by its cgroup, of {size(total)}"
    return Finding(_SECTION, "memory", text)
