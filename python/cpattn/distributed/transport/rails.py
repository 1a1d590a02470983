# SPDX-License-Identifier: Apache-2.0
"""Rails between hosts: pairs of ranks such that each row reaches every other host once."""

from __future__ import annotations

from collections.abc import Sequence

Hosts = tuple[tuple[int, ...], ...]  # ranks of each host


class Rails:
    """Ranks of other hosts with which a rank exchanges rows for its host.

    The k-th rank of a host sends its rows to the k-th rank of every other host. If that host has
    only R <= k ranks, rank k modulo R receives them.

    Parameters
    ----------
    hosts : tuple of tuples of int
        The ranks of each host; every rank of the group is on one of them.
    rank : int
        The rank that sends and receives.

    Attributes
    ----------
    hosts, rank
        As given.
    members, others : tuple of int, tuple of tuples of int
        Ranks on the host of `rank`, and ranks of each other host.
    destinations : tuple of int
        Ranks that receive the rows of `rank`: one on each other host.
    sources : tuple of int
        Ranks whose rows `rank` receives for its host, ascending.
    """

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.hosts, self.rank = hosts, rank
        (self.members,) = (members for members in hosts if rank in members)
        self.others = tuple(members for members in hosts if members != self.members)
        k, size = self.members.index(rank), len(self.members)
        self.destinations = tuple(members[k % len(members)] for members in self.others)
        self.sources = tuple(
            sorted(
                other for members in self.others for j, other in enumerate(members) if j % size == k
            )
        )

    def kept_counts(self, rows_per_rank: Sequence[int]) -> list[int]:
        """Return how many rows of each rank reach this one, its own rows included."""
        kept = {self.rank, *self.sources}
        return [n if rank in kept else 0 for rank, n in enumerate(rows_per_rank)]


def most_received(hosts: Hosts, rows_per_rank: Sequence[int]) -> int:
    """Return the most rows that any rank receives from other hosts."""
    return max(
        sum(rows_per_rank[source] for source in Rails(hosts, rank).sources)
        for members in hosts
        for rank in members
    )
