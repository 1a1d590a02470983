# SPDX-License-Identifier: Apache-2.0
"""Assignment of CPUs to the ranks of a host, so that a rank computes where its memory lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from .._numa import nodes_of
from .topology import cores_of

#: Variables of launchers that tell a process its rank on the host and the ranks of the host.
LAUNCHERS = {
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


class Share(NamedTuple):
    """NUMA nodes, CPUs in ascending order, and number of cores of one rank of a host."""

    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    num_cores: int


def shares(
    root: Path, usable: Collection[int], num_ranks: int, *, smt: bool = False
) -> list[Share]:
    """Divide the CPUs `usable` over the ranks of a host: nodes first, then cores of a node.

    Ranks of one node have consecutive cores, evenly up to one core. Nodes of one rank are
    consecutive, as nodes of one socket are. A core counts once, by its first usable CPU; with `smt`
    its other CPUs come with it. Nodes without a usable CPU, such as pure memory nodes, are left
    out. `root` is the root of the file system.

    Raises
    ------
    ValueError
        If neither of the numbers of nodes and ranks is a multiple of the other, or a node has fewer
        cores than ranks.
    """
    nodes = nodes_of(root, usable) or {"0": set(usable)}
    if num_ranks % len(nodes) and len(nodes) % num_ranks:
        raise ValueError(
            f"--ranks must be a multiple or a divisor of the {len(nodes)} NUMA nodes,"
            f" got {num_ranks}"
        )
    names, found = list(nodes), []
    nodes_each, ranks_each = max(len(names) // num_ranks, 1), max(num_ranks // len(names), 1)
    for first in range(0, len(names), nodes_each):
        group = names[first : first + nodes_each]
        cores = [core for name in group for core in cores_of(root, nodes[name])]
        if len(cores) < ranks_each:
            raise ValueError(
                f"--ranks must leave a core for each: node {group[0]} has {len(cores)} for "
                f"{ranks_each} of the {num_ranks} ranks"
            )
        cuts = [len(cores) * part // ranks_each for part in range(ranks_each + 1)]
        for begin, end in pairwise(cuts):
            chosen = [core if smt else core[:1] for core in cores[begin:end]]
            cpus = tuple(sorted(chain(*chosen)))
            found.append(Share(tuple(group), cpus, len(chosen)))
    return found


def local_rank(environ: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Return the rank of this process on its host and the ranks there; None if not told."""
    for rank, number in LAUNCHERS.values():
        own, ranks = environ.get(rank, ""), environ.get(number, "")
        if own.isdecimal():
            return int(own), int(ranks) if ranks.isdecimal() else None
    return None
