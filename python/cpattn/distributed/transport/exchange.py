# SPDX-License-Identifier: Apache-2.0
"""Exchange of rows between all ranks of a group, once all ranks expect the same rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import _core
from ...profiling.calls import announced
from . import versions
from .rails import Rails
from .roll_call import HOSTS, Host, RollCall, Watch, Words, roll_call_of
from .row_bytes import ArrivingRows, Parts, RoutedRows, columns_of, new_rows, row_bytes, table_of
from .terms import CALLS, OPTIONS, REASON, TERMS, layout, ranks_text, refuse_difference, term
from .waiting import NOT_YET, Posted, Wait, have_come

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
_SLICE = 0.02  # seconds of a wait, until the next look around


class RowExchange:
    """Exchange in which every rank of a group sends its rows to every other rank.

    Agreements before an exchange go through shared memory, once the group has some (`HOSTS`),
    unless `through_memory` is false. A rank that cannot go on tells the others (`RollCall`), so all
    name the same rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, through_memory: bool = True) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._group = group
        self._peers = {
            rank: dist.get_global_rank(group, rank)
            for rank in range(self.size)
            if rank != self.rank
        }
        self._through_memory = through_memory
        self._sequence = 0
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._tables: dict[int, tuple[np.ndarray[Any, Any], list[torch.Tensor]]] = {}
        self.ahead: ArrivingRows | None = None
        self.scratch: list[torch.Tensor] = []  # of `shared_scratch`
        self._roll_call: RollCall | None = None  # from the first exchange on
        self.sent_bytes = self.received_bytes = 0  # bytes of tensors, without backend overhead

    @contextlib.contextmanager
    def agreement(
        self, call: str, plan_terms: Sequence[int], options: dict[str, int] | None = None
    ) -> Iterator[Parts]:
        """Run this rank's checks, which add the parts of its rows, then compare with all ranks.

        The checks may also put digests of the terms in `OPTIONS` into `options`. A rank whose
        checks fail tells the others, which would otherwise wait for its rows. On a difference every
        rank raises the same RuntimeError, and the group stays usable.
        """
        parts = Parts()
        self._sequence += 1
        try:
            yield parts
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the failed check is the better error
                self._all_terms(call, [1] + [0] * (len(TERMS) - 1))
                self._reasons(call, _text_of(error))
            raise
        rows = term(tuple((part.dtype, part.shape[1]) for part in parts))
        more = [(options or {}).get(name, 0) for name in OPTIONS]
        terms = [0, self._sequence, CALLS.index(call), *plan_terms, rows, *more]
        terms.append(parts.shared_memory)
        of_ranks = self._all_terms(call, terms)
        if of_ranks.count(terms) < self.size:
            refused = [rank for rank, told in enumerate(of_ranks) if told[0]]
            if refused:
                raise RuntimeError(
                    f"ContextParallel.{call}: {ranks_text(refused)} refused its arguments; nothing "
                    f"was sent: {self._reasons(call)[refused[0]]}"
                )
            refuse_difference(call, list(zip(*of_ranks, strict=True)))

    def _reasons(self, call: str, text: str = "") -> list[str]:
        """Return each rank's reason for refusing its arguments; all ask once one has refused."""
        line = text.partition("\n")[0].encode(errors="replace")[: REASON.size]
        told = self.told(f"{call} (reason)", REASON.unpack(line.ljust(REASON.size, b"\0")))
        return [REASON.pack(*words).rstrip(b"\0").decode(errors="ignore") for words in told]

    @contextlib.contextmanager
    def without_return(self) -> Iterator[None]:
        """Run steps after agreement: a rank that fails in a step tells the others why."""
        try:
            yield
        except BaseException as error:
            if self._roll_call is not None and not self._roll_call.over:
                self._roll_call.leave(self._group, Words((), _text_of(error)))
            raise

    def all_rows(
        self, call: str, rows_per_rank: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Gather the rows of all ranks, in rank order, for each part [rows_per_rank[rank], width].

        The results stay in the receive buffer until the next call.
        """
        with _core.TraceSpan(_core.TraceScope.gather):
            return self.arrived(self.begin_rows(call, rows_per_rank, parts))

    def begin_rows(
        self,
        call: str,
        rows_per_rank: Sequence[int],
        parts: Sequence[torch.Tensor],
        buffer: Hashable = 0,
        rails: Rails | None = None,
    ) -> ArrivingRows:
        """Begin `all_rows` in a receive buffer; `arrived` waits for it.

        With rails, only rows of their sources arrive, in rank order with this rank's own rows.
        """
        if rails is not None:
            rows_per_rank = rails.kept_counts(rows_per_rank)
        num_rows = sum(rows_per_rank)
        total = num_rows * row_bytes(parts)
        storage = self._buffers.pop(buffer, _EMPTY)  # dropped if rows might still arrive in it
        if storage.numel() < total:
            storage = torch.zeros(total, dtype=torch.uint8, device="cpu")  # padding is sent, too
        rows = storage[:total].view(num_rows, row_bytes(parts))
        columns = columns_of(rows, parts)
        begin = sum(rows_per_rank[: self.rank])
        for column, part in zip(columns, parts, strict=True):
            column[begin : begin + len(part)] = part
        destinations = self._peers if rails is None else rails.destinations
        blocks = rows.split(list(rows_per_rank))
        own = dict.fromkeys(destinations, blocks[self.rank])
        posted = self.post(call, own, {rank: blocks[rank] for rank in self._peers})
        return ArrivingRows(columns, posted, storage, buffer)

    def arrived(self, rows: ArrivingRows) -> list[torch.Tensor]:
        """Return the result of `all_rows`, valid until the next rows use the same buffer."""
        self.finish(rows.posted)
        self._buffers[rows.buffer] = rows.storage
        return rows.columns

    def begin_ahead(
        self, call: str, rows_per_rank: Sequence[int], parts: Sequence[torch.Tensor], buffer: int
    ) -> ArrivingRows:
        """Begin `all_rows` for a later call; the rows may still travel when this call returns.

        The rows use one of two buffers that no other call takes; only one such exchange may run.
        """
        self.end_ahead()
        self.ahead = self.begin_rows(call, rows_per_rank, parts, ("ahead", buffer))
        return self.ahead

    def end_ahead(self) -> list[torch.Tensor]:
        """Wait for the rows that `begin_ahead` has left under way, if any."""
        if self.ahead is None:
            return []
        columns, self.ahead = self.arrived(self.ahead), None
        return columns

    def routed_rows(
        self,
        call: str,
        parts: Sequence[torch.Tensor],
        rows_for: Sequence[torch.Tensor],
        rows_from: Sequence[int],
    ) -> list[torch.Tensor]:
        """Send each rank only the rows of every part that ``rows_for[rank]`` lists.

        The result for each part [sum(rows_from), width] has ``rows_from[rank]`` rows of each rank,
        in rank order.
        """
        return self.routed(self.begin_routed(call, parts, rows_for, rows_from))

    def begin_routed(
        self,
        call: str,
        parts: Sequence[torch.Tensor],
        rows_for: Sequence[torch.Tensor],
        rows_from: Sequence[int],
    ) -> RoutedRows:
        """Begin `routed_rows`; `routed` waits for it."""
        received = torch.empty(sum(rows_from), row_bytes(parts), dtype=torch.uint8, device="cpu")
        blocks = received.split(list(rows_from))
        sends = {}
        for rank, rows in enumerate(rows_for):
            own = rank == self.rank
            block = blocks[rank] if own else new_rows(len(rows), parts)
            for column, part in zip(columns_of(block, parts), parts, strict=True):
                column.copy_(part.index_select(0, rows))
            if not own:
                sends[rank] = block
        posted = self.post(call, sends, {rank: blocks[rank] for rank in self._peers})
        return RoutedRows(columns_of(received, parts), posted)

    def routed(self, rows: RoutedRows) -> list[torch.Tensor]:
        """Return the result of `routed_rows`."""
        self.finish(rows.posted)
        return rows.columns

    def blocks(
        self, call: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Send contiguous tensors to ranks, and receive into others; empty ones do not travel.

        If a peer fails, the call still serves the other peers: they would miss a rank that gave up
        early and blame it.
        """
        self.finish(self.post(call, sends, receives))

    @announced("RowExchange.post")
    def post(
        self, call: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Posted:
        """Begin `blocks`; `finish` waits for it."""
        posted = Posted(call)
        posts: list[tuple[Any, int, torch.Tensor]] = []
        posts += [(dist.irecv, rank, block) for rank, block in receives.items()]
        posts += [(dist.isend, rank, block) for rank, block in sends.items()]
        for post, rank, block in posts:
            if block.numel():
                raw = block.view(-1).view(torch.uint8)
                try:
                    posted.works.append((rank, post(raw, self._peers[rank], self._group)))
                    posted.tensors.append(raw)
                except RuntimeError as error:  # other errors are this rank's own
                    posted.failures.setdefault(rank, error)
        self._roll_call_of_group().keep(posted.works)
        self.sent_bytes += sum(block.nbytes for block in sends.values())
        self.received_bytes += sum(block.nbytes for block in receives.values())
        return posted

    def finish(self, posted: Posted) -> None:
        """Wait for all messages; RuntimeError names the ranks that did not answer."""
        roll_call = self._roll_call_of_group()
        wait = None
        try:
            over_soon = roll_call.has_only(posted.works) and have_come(posted.ends)
            wait = Wait(posted, roll_call.longest_wait, over_soon=over_soon)
            losses, timed_out = self._losses(wait)
        except BaseException as interrupt:  # Ctrl-C
            self._leave(wait, Words((), _text_of(interrupt)))
            raise
        if not losses:
            roll_call.release(posted.works)
            posted.works.clear()  # works keep tensors, too
            posted.tensors.clear()
            return
        error = next(iter(posted.failures.values()), None)
        raise self._lost(posted.call, losses, wait, timed_out=timed_out) from error

    def meet_host(self, call: str, terms: Sequence[int] = ()) -> list[list[int]]:
        """Wait for the ranks that share memory with this one, and return the terms of each.

        RuntimeError names the ranks that did not answer. Ranks of other hosts are told.
        """
        host = HOSTS[self._group]
        if not host.rails.others:
            return host.meet(f"ContextParallel.{call}", terms)
        roll_call = self._roll_call_of_group()
        try:
            return host.meet(f"ContextParallel.{call}", terms, roll_call.has_heard)
        except RuntimeError as error:
            lost, reason, timed_out = host.loss()
            if not lost:  # a forked child has nothing to tell
                raise
            losses = dict.fromkeys(lost, reason)
            if not reason:  # a rank has left, on another host or here
                watch = Watch(self._group, roll_call, time.monotonic())
                losses, timed_out = watch.losses(lost[0])
            raise self._lost(call, losses, None, timed_out=timed_out) from error
        except BaseException as interrupt:  # Ctrl-C
            self._leave(None, Words((), _text_of(interrupt)))
            raise

    def _lost(
        self, call: str, losses: dict[int, str], wait: Wait | None, *, timed_out: bool
    ) -> RuntimeError:
        """Tell the other ranks whom not to wait for, and why; return the error that names them."""
        roll_call = self._roll_call_of_group()
        named = roll_call.named(self.rank, losses)
        self._leave(wait, Words(tuple(sorted(named)), next(iter(named.values())), timed_out))
        named = roll_call.named(self.rank, losses)
        return RuntimeError(
            f"ContextParallel.{call}: {ranks_text(sorted(named))} of {self.size} did not "
            f"answer: {next(iter(named.values()))}"
        )

    def _losses(self, wait: Wait) -> tuple[dict[int, str], bool]:
        """Wait; return the ranks that did not come, why, and whether only time ran out."""
        wait.join(_SLICE)
        losses: dict[int, str] = {}
        timed_out = False
        if not wait.is_over():
            watch = Watch(self._group, self._roll_call_of_group(), wait.begin)
            while not (wait.is_over() or losses):
                wait.join(_SLICE)
                losses, timed_out = watch.losses(wait.awaited)
        if wait.is_over():
            return {rank: str(error) for rank, error in wait.posted.failures.items()}, False
        return losses, timed_out

    def _leave(self, wait: Wait | None, words: Words) -> None:
        """Tell the other ranks, and end all waits for this one."""
        roll_call = self._roll_call_of_group()
        roll_call.leave(self._group, words)
        if wait is not None and not wait.is_over():
            roll_call.hang_up(self._group)
            wait.abandon()

    def _roll_call_of_group(self) -> RollCall:
        if self._roll_call is None:
            self._roll_call = roll_call_of(self._group, self._peers)
        return self._roll_call

    def _all_terms(self, call: str, terms: Sequence[int]) -> list[list[int]]:
        """Return the terms of all ranks, a list per rank."""
        roll_call = self._roll_call_of_group()
        if roll_call.over:
            raise RuntimeError(
                f"ContextParallel.{call}: the group cannot be used any more, rank {self.rank} has "
                "left it by an error"
            )
        if not roll_call.agreed:
            told = self.all_values(f"{call} (agreement)", versions.own_values(layout()))
            if (difference := versions.difference(told)) is not None:
                raise RuntimeError(f"ContextParallel.{call}: {difference}; nothing was sent")
            roll_call.agreed = True
        return self.told(f"{call} (agreement)", terms)

    def host(self) -> Host | None:
        """Return the meeting place of ranks that share memory, if it is known; sends nothing."""
        return HOSTS.get(self._group) if self._through_memory else None

    def told(self, call: str, values: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, a list per rank; all give the same number of values.

        Values go through shared memory if there is any. Between hosts, the values of a whole host
        travel together, to each rank from one rank of every other host.
        """
        host = self.host()
        if host is None:
            return self.all_values(call, values)
        rails = host.rails
        here = torch.tensor(self.meet_host(call, values), dtype=torch.int64, device="cpu")
        if not rails.others:
            return here.tolist()
        others = [rank for ranks in rails.others for rank in ranks]
        arriving = here.new_full((len(others), len(values)), NOT_YET)
        blocks = arriving.split([len(ranks) for ranks in rails.others])
        # Rows of a source come here, so this rank asks for the values of the source's host.
        posted = self.post(
            call,
            dict.fromkeys(rails.sources, here),
            dict(zip(rails.destinations, blocks, strict=True)),
        )
        if sorted(rails.destinations) == list(rails.sources):
            posted.ends = arriving.numpy()[:, -1]
        self.finish(posted)
        rows = here.new_empty(self.size, len(values))
        rows[list(rails.members)], rows[others] = here, arriving
        return rows.tolist()

    def all_values(self, call: str, values: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, a list per rank; all give the same number of values."""
        # Dropped if a message might still arrive in it.
        made = self._tables.pop(len(values), None)
        table, blocks = made or table_of(self.size, len(values))
        table.fill(NOT_YET)
        table[self.rank] = values
        posted = self.post(
            call,
            dict.fromkeys(self._peers, blocks[self.rank]),
            {rank: blocks[rank] for rank in self._peers},
        )
        posted.ends = table[:, -1]
        self.finish(posted)
        self._tables[len(values)] = table, blocks
        return table.tolist()


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
