# SPDX-License-Identifier: Apache-2.0
"""Calls of `ContextParallel` around attention: rows, agreements and hosts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .layers.rows import rows_of
from .plans.plan import ContextParallelPlan
from .plans.sharded_plan import check_rank
from .plans.tokens import index_array
from .transport.exchange import RowExchange
from .transport.host import CONNECTIONS, Connection, connect
from .transport.shared_memory import SharedMemory
from .transport.terms import MOST_VALUES, NO_TERMS, digest, refuse_difference, term
from .transport.topology import Topology


class RowCalls:
    """Calls of `ContextParallel` that an engine makes around attention."""

    group: dist.ProcessGroup
    transport: str
    _exchange: RowExchange
    _connected: Connection | None = None

    def gather(
        self, plan: ContextParallelPlan, x_local: torch.Tensor, dim: int = 0, *, tokens: Any = None
    ) -> torch.Tensor:
        """Exchange the rows of all ranks and put them into token order: the inverse of ``shard``.

        Parameters
        ----------
        plan : ContextParallelPlan
            The result of this object's `plan`, for the same batch on every rank.
        x_local : tensor with at least num_local_rows rows along `dim`, of any dtype
            Rows in the order of ``shard``; further rows are never read. With `tokens`, only the
            rows of the selected tokens that this rank has, in this order.
        dim : int
            The token dimension.
        tokens : ints [n], optional
            Selected tokens of the batch, each once, such as the last token of each request.
            Default: all.

        Returns
        -------
        x : tensor with num_tokens rows along `dim`, or one for each of `tokens`, contiguous
            New tensor, the same on every rank.

        Raises
        ------
        TypeError
            If rows are not on the CPU or require a gradient, or `tokens` has no integers.
        ValueError
            If there are too few rows, the plan is of another rank, or a token is outside the batch
            or comes twice.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan, other
            tokens or rows, or does not answer.
        """
        terms: dict[str, int] = {}
        plan_terms = getattr(plan, "terms", NO_TERMS)
        with self._exchange.agreement("gather", plan_terms, terms) as parts:
            check_rank("gather", self._exchange, plan)
            x = x_local.movedim(dim, 0)
            places, counts = plan.gathered_rows, list(plan.rows_per_rank)
            if tokens is not None:
                chosen = _checked_tokens(tokens, plan.num_tokens)
                terms["options"] = digest(chosen)
                places, counts = _places_of(plan, chosen)
            parts.append(rows_of("gather", counts[plan.cp_rank], plan.cp_rank, "x_local", x))
        with self._exchange.without_return():
            (rows,) = self._exchange.all_rows("gather", counts, parts)
        ordered = rows.index_select(0, places)
        return ordered.view(len(places), *x.shape[1:]).movedim(0, dim).contiguous()

    @contextmanager
    def agreement(self) -> Iterator[dict[str, Hashable]]:
        """Compare values that all ranks must share before they go on, such as a model or prompts.

        The ``with`` block gives a dictionary; every rank puts numbers and texts into it under the
        same names, and their digests are compared at the end of the block. All ranks make the call.
        If a rank raises an error in the block, the other ranks learn its number.

        Raises
        ------
        RuntimeError
            If values or names differ; the message names the ranks. It is also raised if another
            rank has raised an error in the block, makes another call or does not answer; only the
            last makes the group unusable.

        Examples
        --------
        >>> import torch.distributed as dist
        >>> from cpattn.distributed import ContextParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = ContextParallel(dist.group.WORLD, page_size=4)
        >>> with cp.agreement() as values:
        ...     values["prompts"] = ((1, 2), (3,))
        >>> dist.destroy_process_group()
        """
        values: dict[str, Hashable] = {}
        terms: dict[str, int] = {}
        with self._exchange.agreement("agreement", NO_TERMS, terms):
            yield values
            terms["options"] = term(tuple(values))
            digests = [term(value) for value in values.values()]
        for begin in range(0, len(digests), MOST_VALUES):
            part = slice(begin, begin + MOST_VALUES)
            told = self._exchange.told("agreement", digests[part])
            refuse_difference("agreement", list(zip(*told, strict=True)), tuple(values)[part])

    def topology(self) -> Topology:
        """Find out which ranks share a host, and whether they share memory there.

        The first call for a group, of this method or of `shared_memory`, asks all ranks, so all
        make it; later calls are local.

        Returns
        -------
        Topology
            Topology, the same on every rank.

        Raises
        ------
        RuntimeError
            If another rank makes another call, has another `transport`, or does not answer.
        """
        return self._connection.topology

    def shared_memory(self) -> SharedMemory | None:
        """Return memory that the ranks of a host share, as `memory` for a pool of `cpattn.kv`.

        `write_kv` recognizes such pools by their addresses. Every rank then writes its own rows in
        place, once for its whole host, which has no other copy. With several hosts, each row
        travels once to every other host, where one rank writes it into the pool. Collective like
        `topology`.

        Returns
        -------
        SharedMemory or None
            None if no ranks share a host, or if sharing is turned off: a pool with this memory
            belongs to the rank alone, and `write_kv` sends rows to all ranks.

        Raises
        ------
        RuntimeError
            See `topology`.
        """
        host = self._connection.host
        return None if host is None else SharedMemory(host, self._exchange)

    @property
    def _connection(self) -> Connection:
        # No cached_property: in CPython 3.11 ranks that are threads of one process would all wait
        # for its single lock, which the first rank holds while it waits for the others.
        if self._connected is None:
            known = None if self.transport == "tcp" else CONNECTIONS.get(self.group)
            self._connected = known or connect(self.group, self._exchange, self.transport)
        return self._connected


def _checked_tokens(tokens: Any, num_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    chosen = index_array("tokens", tokens, 1, "ContextParallel.gather").astype(np.int64)
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < num_tokens:
        raise ValueError(
            f"ContextParallel.gather: tokens must be in [0, {num_tokens}), got {chosen.min()} to "
            f"{chosen.max()}"
        )
    if len(np.unique(chosen)) < len(chosen):
        raise ValueError("ContextParallel.gather: tokens must be given once each")
    return chosen


def _places_of(
    plan: ContextParallelPlan, tokens: np.ndarray[Any, np.dtype[np.int64]]
) -> tuple[torch.Tensor, list[int]]:
    """Return the place of each token among the selected rows of all ranks, and rows per rank."""
    gathered = plan.gathered_rows.numpy()[tokens]
    places = np.empty(len(tokens), np.int64)
    places[np.argsort(gathered)] = np.arange(len(tokens))
    owners = np.searchsorted(np.cumsum(plan.rows_per_rank), gathered, side="right")
    return torch.from_numpy(places), np.bincount(owners, minlength=len(plan.rows_per_rank)).tolist()
