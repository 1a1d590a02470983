# SPDX-License-Identifier: Apache-2.0
"""Topology of a group: which ranks share a host, and what they exchange rows through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The hosts of a group and the transport of its ranks, from `ContextParallel.topology`.

    Attributes
    ----------
    transport : {"shm", "shm+tcp", "tcp"}
        "shm": all ranks share memory, and pools of it are written in place. "shm+tcp": those of
        each host do so, and rows go from host to host through the process group. "tcp": all rows
        go through it.
    hosts : tuple of str
        The name of each host, as its lowest rank knows it. Two hosts may have the same.
    ranks_of_host : tuple of tuples of int
        The ranks of each, ascending.
    reason : str
        Why this transport.

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
