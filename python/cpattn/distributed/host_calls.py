# SPDX-License-Identifier: Apache-2.0
"""The calls of `ContextParallel` about the hosts that its ranks are on."""

from __future__ import annotations

from functools import cached_property

import torch.distributed as dist

from .transport.exchange import RowExchange
from .transport.host import Connection, connect, known_connection
from .transport.shared_memory import SharedMemory
from .transport.topology import Topology


class HostCalls:
    """Calls of `ContextParallel` about hosts, and the memory that its ranks share there."""

    group: dist.ProcessGroup
    transport: str
    _exchange: RowExchange

    def topology(self) -> Topology:
        """Find out which ranks share a host, and whether they share memory there.

        The ranks ask each other once for a group, at the first call of this or of
        `shared_memory`, which all ranks make; later calls are local.

        Returns
        -------
        Topology
            The same on every rank.

        Raises
        ------
        RuntimeError
            If another rank makes another call, has another `transport`, or does not answer.
        """
        return self._connection.topology

    def shared_memory(self) -> SharedMemory | None:
        """Give memory that the ranks of a host share, for a pool of `cpattn.kv`, as its `memory`.

        `write_kv` knows such pools by their addresses. Every rank writes its own rows in place
        then, once for all of its host: no other copy is kept there. Between hosts, where there are
        several, a row is sent once to each, to a rank that writes it into the pool of that host.
        Collective as `topology`.

        Returns
        -------
        SharedMemory or None
            None where no ranks share a host, or not to share was asked for: a pool of this memory
            is that of the rank alone, and `write_kv` sends rows to all.

        Raises
        ------
        RuntimeError
            As of `topology`.
        """
        host = self._connection.host
        return None if host is None else SharedMemory(host, self._exchange)

    @cached_property
    def _connection(self) -> Connection:
        known = None if self.transport == "tcp" else known_connection(self.group)
        return known or connect(self.group, self._exchange, self.transport)
