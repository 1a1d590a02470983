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

    The pages of a buffer come from one node alone, or from several by turns. Without it each page
    comes from the node of the thread that writes to it first, or from another one where that node
    is full, be it of files that the system would give up for a page that must be there.

    Parameters
    ----------
    nodes : sequence of int, default those of the CPUs that this process may use
        Numbers of nodes, as `numactl --hardware` has them. A rank that is bound to one node has
        its pool there; a process on all sockets has pages by turns, so that their threads read
        from all memory controllers at once, whichever sequences there are.

    Attributes
    ----------
    nodes : tuple of int
        In ascending order.

    Raises
    ------
    TypeError, ValueError
        For nodes that are no numbers, or have no memory that this process may use.
    RuntimeError
        Where the system tells of no nodes, as macOS. A pool raises it where the system places no
        memory: in containers without the capability SYS_NICE.
    MemoryError
        By a pool that is larger than all memory of the nodes.

    Notes
    -----
    Memory is taken as rows are written. Where one node has been chosen and others fill it
    meanwhile, the system ends a process, as it does when all nodes are full.

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
        """A buffer of zeros for each kind, on the nodes; errors are in the name of `function`."""
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
