# SPDX-License-Identifier: Apache-2.0
"""Exchange that passes queries: every rank attends with all queries to the keys that it holds.

Queries of some KV heads travel while the previous heads are computed and earlier partial results
return. With a single KV head, as for latents, the ranks' queries take turns instead. New keys first
go to the ranks that keep them, in the same way. Scratch of a rank: the queries of all ranks, or of
two rounds of heads, with their partial results, and the partial results of its own rows from each
rank. For equal numbers of rows these are about
``2 * num_tokens * num_heads * (head_dim + v_head_dim)`` elements, for any context length.
"""

from __future__ import annotations

from functools import partial

import torch

from ..plans.sharded_plan import ShardedPlan
from ..transport.row_bytes import ArrivingRows, RoutedRows
from ..transport.waiting import Posted
from .layer import RankLayer
from .partials import State, attend_part, merged, merged_columns, no_state
from .rounds import head_rounds, side_by_side
from .sharded_write import OwnerRoutes, Routed


def attend(layer: RankLayer[ShardedPlan]) -> State:
    """Return attention and LSE of this rank's rows; write new keys, if there are any.

    Partial results merge in rank order, so the bits do not depend on the order of arrival.
    """
    own = _PassQ(layer)
    if layer.num_kv_heads == 1 and len(own.rounds(layer.exchange.size)) > 1:
        return own.by_ranks()
    return own.by_heads()


class _PassQ:
    """Layer whose queries travel."""

    def __init__(self, layer: RankLayer[ShardedPlan]) -> None:
        self._layer = layer
        self._exchange, self._plan, self._inputs = layer.exchange, layer.plan, layer.inputs
        tokens = torch.arange(layer.plan.num_tokens, device="cpu")
        self._rows = tokens.split(list(layer.plan.rows_per_rank))  # of each rank

    def rounds(self, num_heads: int) -> list[slice]:
        """Divide the heads into rounds, the same on every rank."""
        plan, inputs = self._plan, self._inputs
        sizes = inputs.sizes()
        row_bytes = sizes.num_heads * (sizes.query + sizes.output)
        if self._layer.new is not None:
            row_bytes += sizes.num_kv_heads * inputs.head_bytes
        others = plan.num_tokens - min(plan.rows_per_rank)
        return head_rounds(num_heads, others * row_bytes, self._layer.flops)

    def by_heads(self) -> State:
        """Attend head by head, or with all heads at once if scales of tokens cover all heads."""
        exchange, plan, inputs = self._exchange, self._plan, self._inputs
        options, num_kv_heads = inputs.options, inputs.k.shape[1]
        num_rows = [len(inputs.q)] * exchange.size
        routes = OwnerRoutes("attend", exchange, plan, self._layer.new, num_kv_heads)
        returning: list[tuple[slice, RoutedRows]] = []

        def begin(heads: slice, buffer: int) -> tuple[Routed, ArrivingRows]:
            routed = routes.begin(heads)
            rows = inputs.q[:, inputs.q_heads(heads)].flatten(1)
            return routed, exchange.begin_rows("attend", plan.rows_per_rank, [rows], buffer)

        def compute(heads: slice, begun: tuple[Routed, ArrivingRows]) -> None:
            routed, arriving = begun
            routes.store(routed)
            (rows,) = exchange.arrived(arriving)
            queries = rows.unflatten(1, (-1, inputs.q.shape[2]))
            parts = self._attend(slice(0, plan.num_tokens), queries, heads)
            returning.append((heads, exchange.begin_routed("attend", parts, self._rows, num_rows)))

        whole = slice(0, num_kv_heads)
        side_by_side(
            [whole] if options.has_token_scales else self.rounds(num_kv_heads), begin, compute
        )
        out, lse = no_state(len(inputs.q), inputs.q, inputs.v)
        for heads, rows in returning:
            q_heads = inputs.q_heads(heads)
            sinks = None if options.sinks is None else options.sinks[q_heads]
            outs, lses = exchange.routed(rows)
            out[:, q_heads], lse[:, q_heads] = merged_columns(outs, lses, exchange.size, sinks)
        return State(out, lse)

    def by_ranks(self) -> State:
        """Attend with the queries of each rank in turn, this rank's first."""
        exchange, plan, inputs = self._exchange, self._plan, self._inputs
        rank, size = exchange.rank, exchange.size
        routes = OwnerRoutes("attend", exchange, plan, self._layer.new)
        routed = routes.begin()
        own = inputs.q.contiguous()
        asked, coming = [own], [Posted("attend")]  # by step
        for step in range(1, size):
            source = (rank - step) % size
            asked.append(own.new_empty(plan.rows_per_rank[source], *own.shape[1:]))
            coming.append(
                exchange.post("attend", {(rank + step) % size: own}, {source: asked[step]})
            )
        routes.store(routed)
        returning: dict[int, RoutedRows] = {}
        for step in range(size):
            source, answering = (rank - step) % size, (rank + step) % size
            exchange.finish(coming[step])
            begin, num_rows = sum(plan.rows_per_rank[:source]), len(asked[step])
            parts = self._attend(slice(begin, begin + num_rows), asked[step], slice(0, 1))
            every = torch.arange(num_rows, device="cpu")
            rows_for = [every if r == source else every[:0] for r in range(size)]
            rows_from = [len(own) if r == answering else 0 for r in range(size)]
            returning[answering] = exchange.begin_routed("attend", parts, rows_for, rows_from)
        states = []
        for answering in range(size):
            out, lse = exchange.routed(returning[answering])
            states.append(State(out.unflatten(1, (lse.shape[1], -1)), lse))
        return merged(states, inputs.options.sinks)

    def _attend(self, rows: slice, queries: torch.Tensor, heads: slice) -> list[torch.Tensor]:
        """Return partial results of some rows and heads, as flat rows, and their LSE."""
        inputs, options = self._inputs, self._inputs.options
        call = self._plan.batch.call(
            self._exchange.rank, rows, causal=options.causal, window=options.window
        )
        rope = None if inputs.k_rope is None else inputs.k_rope[:, heads]
        out, lse = attend_part(
            call, queries, inputs.k[:, heads], inputs.v[:, heads],
            options.of_heads(heads, inputs.q_heads(heads)),
            partial(self._plan.batch.positions, self._exchange.rank, rows), rope,
        )  # fmt: skip
        return [out.flatten(1), lse]
