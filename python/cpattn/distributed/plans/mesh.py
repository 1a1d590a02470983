# SPDX-License-Identifier: Apache-2.0
"""Ranks in two dimensions, as of a `DeviceMesh`: those of a row share heads, rows pass on keys."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..transport.timeouts import timeout_of

Mesh = tuple[tuple[int, ...], ...]  # ranks of a group: a row for each place on the ring

DIMS = ("ring", "heads")
# Of the group of a mesh's first dimension: those of all ranks of meshes, made once.
_FLAT_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def group_and_mesh(group: Any) -> tuple[dist.ProcessGroup, Mesh | None]:
    """The group of all ranks, and their mesh if they are in two dimensions.

    A mesh of some of the ranks of the default group gets a group of its own at its first use, for
    which its ranks alone have to meet, with the timeout of the default group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group, None
    if not isinstance(group, DeviceMesh):
        raise TypeError(
            f"ContextParallel: group must be a ProcessGroup or a DeviceMesh, got {group!r}"
        )
    if group.get_coordinate() is None:
        raise ValueError("ContextParallel: group must be a DeviceMesh that has this rank")
    if group.ndim == 1:
        return group.get_group(), None
    names = group.mesh_dim_names or ()
    if sorted(names) != sorted(DIMS):
        raise ValueError(
            "ContextParallel: group must be a DeviceMesh of one dimension, or of two with the "
            f"names ring and heads, got {group.ndim} with the names {', '.join(names) or 'None'}"
        )
    ranks = group.mesh if tuple(names) == DIMS else group.mesh.T
    ordered = sorted(ranks.flatten().tolist())  # as ranks of a group are
    rows = tuple(tuple(ordered.index(rank) for rank in row) for row in ranks.tolist())
    return _flat_group(group, tuple(ordered)), rows


@dataclass(frozen=True)
class Place:
    """Place of a rank in a mesh: on the ring, and among the ranks of its row."""

    mesh: Mesh
    ring: int
    column: int

    @property
    def row(self) -> tuple[int, ...]:
        """The ranks that it shares heads with."""
        return self.mesh[self.ring]

    @property
    def ring_size(self) -> int:
        """Rows of the mesh."""
        return len(self.mesh)

    def neighbour(self, step: int) -> int:
        """The rank of the same heads so many places further on the ring."""
        return self.mesh[(self.ring + step) % self.ring_size][self.column]


def place_of(mesh: Mesh, rank: int) -> Place:
    """The place of a rank, which the mesh has."""
    return next(Place(mesh, i, row.index(rank)) for i, row in enumerate(mesh) if rank in row)


def _flat_group(mesh: DeviceMesh, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and ranks == tuple(range(dist.get_world_size())):
        return world
    known = _FLAT_GROUPS.setdefault(mesh.get_group(0), {})
    if ranks not in known:
        known[ranks] = dist.new_group(
            list(ranks),
            timeout=None if world is None else timedelta(seconds=timeout_of(world)),
            backend="gloo",
            use_local_synchronization=True,
        )
    return known[ranks]
