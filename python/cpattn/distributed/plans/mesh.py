# SPDX-License-Identifier: Apache-2.0
"""Ranks in two dimensions, as in a `DeviceMesh`: a row shares heads, and rows pass keys on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..transport.timeouts import timeout_of

Mesh = tuple[tuple[int, ...], ...]  # ranks of a group, with a row for each place on the ring

DIMS = ("ring", "heads")
# Groups of all ranks of a mesh, made once, by the group of the mesh's first dimension.
_FLAT_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def group_and_mesh(group: Any) -> tuple[dist.ProcessGroup, Mesh | None]:
    """Return the group of all ranks, and their mesh if they are in two dimensions.

    A mesh with only some ranks of the default group gets its own group at first use, with the
    default group's timeout; only its ranks have to meet.
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
    ordered = sorted(ranks.flatten().tolist())  # in the order of ranks of a group
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
        """Ranks that share heads with this one."""
        return self.mesh[self.ring]

    def neighbour(self, step: int) -> int:
        """Return the rank with the same heads, `step` places further on the ring."""
        return self.mesh[(self.ring + step) % len(self.mesh)][self.column]


def place_of(mesh: Mesh, rank: int) -> Place:
    """Return the place of a rank of the mesh."""
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
