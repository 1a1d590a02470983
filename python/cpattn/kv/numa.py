# SPDX-License-Identifier: Apache-2.0
"""Memory for KV pools on chosen NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .. import _core
from .._numa import memory_nodes, nodes_of, ranges
from .buffers import BufferShape, Memory

_ROOT = Path("/")


class NumaMemory(Memory):
    """Memory of this process on chosen NUMA nodes, as the `memory` of a pool.

    Pages of a buffer come from one node, or from several nodes in turn. Without this object, a page
    comes from the node of the thread that first writes to it, or from another node if that one is
    full, even if it is full of cached files that the system would drop.

    Parameters
    ----------
    nodes : sequence of int, default those of the CPUs that this process may use
        Node numbers, as in `numactl --hardware`. Give a rank that is bound to one node this node. A
        process on all sockets takes pages in turn, so that its threads read from all memory
        controllers at once, for any sequences.

    Attributes
    ----------
    nodes : tuple of int
        In ascending order.

    Raises
    ------
    TypeError, ValueError
        If a node is no number, or has no memory that this process may use.
    RuntimeError
        If the system reports no nodes, as macOS. A pool raises it if the system cannot place
        memory, as in containers without the capability SYS_NICE.
    MemoryError
        Raised by a pool that is larger than all memory of the nodes.

    Notes
    -----
    Memory is committed as rows are written. If other processes fill a single chosen node meanwhile,
    the system kills a process, as it does when all nodes are full.

    Examples
    --------
    >>> from cpattn.kv import MHATokenToKVPool, NumaMemory
    >>> pool = MHATokenToKVPool(size=64, page_size=4, num_layers=2, num_kv_heads=1, head_dim=16,
    ...                         memory=NumaMemory([0]))
    >>> pool.get_key_buffer(1).shape
    torch.Size([17, 4, 1, 16])
    """

    def __init__(self, nodes: Sequence[int] | None = None) -> None:
        function = type(self).__name__
        self._bytes = memory_nodes(_ROOT)
        if not self._bytes:
            raise RuntimeError(f"{function}: the system does not tell of NUMA nodes")
        if nodes is None:
            own = map(int, nodes_of(_ROOT, os.sched_getaffinity(0)))
            nodes = [node for node in own if node in self._bytes]
            if not nodes:
                raise ValueError(
                    f"{function}: nodes must be given, as those of the CPUs have no memory"
                )
        given = set(_core.ints(nodes, function, "nodes"))
        if not given or given - set(self._bytes):
            what = ranges(given - set(self._bytes)) if given else "none"
            raise ValueError(
                f"{function}: nodes must be of {ranges(self._bytes)}, where this process may have "
                f"memory, got {what}"
            )
        self.nodes = tuple(sorted(given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumaMemory) and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __repr__(self) -> str:
        return f"NumaMemory({list(self.nodes)})"

    def _make_buffers(
        self, function: str, shapes: dict[str, BufferShape]
    ) -> dict[str, _core.KVBuffer]:
        """Make a buffer of zeros for each kind, on the nodes; errors name `function`."""
        needed = sum(shape.num_bytes for shape in shapes.values())
        there = sum(self._bytes[node] for node in self.nodes)
        if needed > there:
            raise MemoryError(
                f"{function}: NUMA nodes {ranges(self.nodes)} have {there / 2**30:.3g} GiB, less "
                f"than {needed / 2**30:.3g} GiB of a pool"
            )
        return {
            kind: _core.KVBuffer(function, *shape, nodes=self.nodes)
            for kind, shape in shapes.items()
        }
