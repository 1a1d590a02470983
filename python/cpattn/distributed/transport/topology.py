# SPDX-License-Identifier: Apache-2.0
"""Topology of a group: ranks that share a host, and the transport of rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The hosts of a group and the transport of its ranks, from `ContextParallel.topology`.

    Attributes
    ----------
    transport : {"shm", "shm+tcp", "tcp"}
        "shm": all ranks share memory and write pools in it in place. "shm+tcp": the ranks of each
        host do so, and rows travel between hosts through the process group. "tcp": all rows travel
        through the process group.
    hosts : tuple of str
        Name of each host, as its lowest rank knows it. Two hosts may have the same name.
    ranks_of_host : tuple of tuples of int
        Ranks of each host, ascending.
    reason : str
        Reason for the transport.

    Examples
    --------
    >>> from cpattn.distributed import Topology
    >>> Topology("tcp", ("a", "b"), ((0,), (1,)), "ranks are on 2 hosts")
    Topology(tcp, because ranks are on 2 hosts; a: rank 0; b: rank 1)
    """

    transport: str
    hosts: tuple[str, ...]
    ranks_of_host: tuple[tuple[int, ...], ...]
    reason: str

    def __repr__(self) -> str:
        hosts = "; ".join(
            f"{name}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for name, ranks in zip(self.hosts, self.ranks_of_host, strict=True)
        )
        return f"Topology({self.transport}, because {self.reason}; {hosts})"
