# SPDX-License-Identifier: Apache-2.0
"""The CPUs of each rank of a host, so that a rank computes where its memory lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .topology import cores_of, nodes_of

#: Variables by which launchers tell a process its rank on the host, and the ranks of the host.
LAUNCHERS = {
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@dataclass(frozen=True)
class Share:
    """NUMA nodes, CPUs in ascending order, and number of cores of one rank of a host."""

    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    num_cores: int


def shares(
    root: Path, usable: Collection[int], num_ranks: int, *, smt: bool = False
) -> list[Share]:
    """Divide the CPUs `usable` over the ranks of a host: nodes first, then cores of a node.

    Ranks of one node have consecutive cores, at most one more than each other; nodes of one rank
    are consecutive, as those of one socket are. A core counts once, by its first CPU that is
    usable; with `smt` its other CPUs come with it. Nodes without a usable CPU, such as memory
    alone, are left out. `root` is that of the file system.

    Raises
    ------
    ValueError
        If neither number of nodes and ranks is a multiple of the other, or a node has fewer cores
        than ranks.
    """
    nodes = nodes_of(root, usable) or {"0": set(usable)}
    if num_ranks % len(nodes) and len(nodes) % num_ranks:
        raise ValueError(
            f"--ranks must be a multiple or a divisor of the {len(nodes)} NUMA nodes,"
            f" got {num_ranks}"
        )
    names = list(nodes)
    if num_ranks <= len(nodes):
        per_rank = len(nodes) // num_ranks
        groups = [tuple(names[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
        return [_share(g, [c for n in g for c in cores_of(root, nodes[n])], smt) for g in groups]
    found = []
    per_node = num_ranks // len(nodes)
    for name in names:
        cores = cores_of(root, nodes[name])
        if len(cores) < per_node:
            raise ValueError(
                f"--ranks must leave a core for each: node {name} has {len(cores)} for {per_node}"
                f" of the {num_ranks} ranks"
            )
        cuts = [len(cores) * part // per_node for part in range(per_node + 1)]
        found += [_share((name,), cores[begin:end], smt) for begin, end in pairwise(cuts)]
    return found


def _share(nodes: tuple[str, ...], cores: list[list[int]], smt: bool) -> Share:
    cpus = sorted(cpu for core in cores for cpu in (core if smt else core[:1]))
    return Share(nodes, tuple(cpus), len(cores))


def local_rank(environ: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Rank of this process on its host and the ranks there, each if a launcher tells."""
    for rank, number in LAUNCHERS.values():
        own, ranks = environ.get(rank, ""), environ.get(number, "")
        if own.isdecimal():
            return int(own), int(ranks) if ranks.isdecimal() else None
    return None
