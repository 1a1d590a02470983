# SPDX-License-Identifier: Apache-2.0
"""Sockets, cores and NUMA nodes of the CPUs that this process may use, and its memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from .finding import Finding

_SECTION = "machine"
#: Bounds of the two kinds of cgroups; the older one has a huge number for none.
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def findings(root: Path, usable: Collection[int]) -> Iterator[Finding]:
    """Report all that this file knows of the CPUs `usable`; `root` as in `machine.findings`."""
    yield _cores(root, usable)
    yield _numa(root, usable)
    yield _memory(root)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 1 << 30 else f"{number / 2**20:.0f} MiB"


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""


def cpus_of(ranges: str) -> set[int]:
    """CPUs of ranges as Linux writes them.

    >>> cpus_of("0-2,8")
    {0, 1, 2, 8}
    """
    pairs = re.findall(r"(\d+)(?:-(\d+))?", ranges)
    return {cpu for first, last in pairs for cpu in range(int(first), int(last or first) + 1)}


def _cores(root: Path, usable: Collection[int]) -> Finding:
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in usable]
    sockets = {_read(folder / "physical_package_id") for folder in folders}
    cores = {_read(folder / "thread_siblings_list") for folder in folders}
    if "" in sockets | cores or not folders:
        return Finding(_SECTION, "cores", "the system does not say")
    text = f"{count(len(cores), 'core')} of {count(len(sockets), 'socket')}"
    if len(cores) == len(usable):
        return Finding(_SECTION, "cores", text)
    text += f" are the {len(usable)} CPUs: threads of a call share cores"
    hint = f"export CPATTN_NUM_THREADS={len(cores)}, for one thread a core"
    return Finding(_SECTION, "cores", text, "note", hint)


def _numa(root: Path, usable: Collection[int]) -> Finding:
    folder = root / "sys/devices/system/node"
    nodes = {path.name[4:]: path for path in folder.glob("node[0-9]*") if path.is_dir()}
    if not nodes:
        return Finding(_SECTION, "NUMA", "the system does not say")
    own = [
        name
        for name, path in nodes.items()
        if not cpus_of(_read(path / "cpulist")).isdisjoint(usable)
    ]
    if len(nodes) == 1 or len(own) == 1:
        whole = count(len(nodes), "node")
        return Finding(_SECTION, "NUMA", whole if len(nodes) == 1 else f"node {own[0]} of {whole}")
    text = f"{len(own)} of {count(len(nodes), 'node')}: a call whose threads are on several reads "
    hint = "a process for each node: numactl --cpunodebind=N --membind=N ..."
    return Finding(_SECTION, "NUMA", f"{text}memory of the others", "note", hint)


def _memory(root: Path) -> Finding:
    kibibytes = re.search(r"^MemTotal:\s*(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    if not kibibytes:
        return Finding(_SECTION, "memory", "the system does not say")
    total = int(kibibytes[1]) << 10
    limits = (_read(root / "sys/fs/cgroup" / name) for name in _MEMORY_LIMITS)
    limit = min([total, *(int(text) for text in limits if text.isdecimal())])
    text = size(total) if limit == total else f"{size(limit)} by its cgroup, of {size(total)}"
    return Finding(_SECTION, "memory", text)
