# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes, and the CPUs and memory of each, from the files of Linux."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_NODES = "sys/devices/system/node"


def read(path: Path) -> str:
    """Return the content of a system file, or "" if there is no such file."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""


def numbers_of(ranges: str) -> set[int]:
    """Return the CPUs or nodes in ranges in the notation of Linux.

    >>> numbers_of("0-2,8")
    {0, 1, 2, 8}
    """
    pairs = re.findall(r"(\d+)(?:-(\d+))?", ranges)
    return {cpu for first, last in pairs for cpu in range(int(first), int(last or first) + 1)}


def ranges(numbers: Iterable[int]) -> str:
    """Return CPUs or nodes as ranges, in the notation of Linux and taskset.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    chosen = set(numbers)
    begins = sorted(c for c in chosen if c - 1 not in chosen)
    ends = sorted(c for c in chosen if c + 1 not in chosen)
    pairs = zip(begins, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def nodes_of(root: Path, usable: Collection[int]) -> dict[str, set[int]]:
    """Return the CPUs in `usable` of each NUMA node that has any, by node number."""
    folders = sorted(
        (int(path.name[4:]), path) for path in (root / _NODES).glob("node[0-9]*") if path.is_dir()
    )
    found = {str(node): numbers_of(read(path / "cpulist")) & set(usable) for node, path in folders}
    return {node: cpus for node, cpus in found.items() if cpus}


def memory_nodes(root: Path) -> dict[int, int]:
    """Return the total bytes of memory of each NUMA node that this process may use."""
    allowed = re.search(
        r"^Mems_allowed_list:\s*(\S+)$", read(root / "proc/self/status"), re.MULTILINE
    )
    found = {}
    for node in sorted(numbers_of(allowed[1] if allowed else "")):
        text = read(root / _NODES / f"node{node}/meminfo")
        kibibytes = re.search(r"MemTotal:\s*(\d+) kB", text)
        if kibibytes:
            found[node] = int(kibibytes[1]) << 10
    return found
