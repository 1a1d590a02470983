# SPDX-License-Identifier: Apache-2.0
"""Rails between hosts: senders and receivers such that a rank's rows reach each other host once."""

from __future__ import annotations

from collections.abc import Sequence

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each


class Rails:
    """Ranks of other hosts with which a rank exchanges, on behalf of its host.

    The k-th rank of a host sends its rows to the k-th of every other one; to that at k modulo R,
    where those are R and fewer.

    Parameters
    ----------
    hosts : tuple of tuples of int
        The ranks of each host; every rank of the group is on one of them.
    rank : int
        The rank whose exchanges these are.

    Attributes
    ----------
    hosts, rank
        As given.
    members, others : tuple of int, tuple of tuples of int
        The ranks of its host, and those of each other one.
    destinations : tuple of int
        Ranks that get its rows: one of each other host.
    sources : tuple of int
        Ranks whose rows it receives for its host, ascending: it is a destination of each.
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
        """The rows of each rank that come to this one, its own among them."""
        kept = {self.rank, *self.sources}
        return [n if rank in kept else 0 for rank, n in enumerate(rows_per_rank)]


def most_received(hosts: Hosts, rows_per_rank: Sequence[int]) -> int:
    """The rows of other hosts that the rank receives which receives most."""
    return max(
        sum(rows_per_rank[source] for source in Rails(hosts, rank).sources)
        for members in hosts
        for rank in members
    )
