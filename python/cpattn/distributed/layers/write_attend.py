# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.attend` that also writes new rows, for pools that hold all keys on every rank.

KV heads go in rounds: new rows of some heads travel while the previous heads are written and
computed. Scratch of a rank: twice the new rows of the heads of a round, and a copy of the keys and
values of these heads for the whole context.
"""

from __future__ import annotations

from typing import Any

from ..plans.plan import ContextParallelPlan
from ..transport.exchange import RowExchange
from ..transport.rails import most_received
from ..transport.row_bytes import ArrivingRows
from ..transport.terms import NO_TERMS
from .head_attention import HeadOutputs
from .layer import LayerArguments, RankLayer, checked_layer
from .partials import AttentionOptions
from .rounds import head_rounds, side_by_side
from .rows import take_rows
from .shared_rows import SharedRows, shared_digest


def write_and_attend(
    exchange: RowExchange,
    plan: ContextParallelPlan,
    arguments: LayerArguments,
    options: AttentionOptions,
) -> Any:
    """Run ContextParallel.attend."""
    terms: dict[str, int] = {}
    host = exchange.host()
    with exchange.agreement("attend", getattr(plan, "terms", NO_TERMS), terms) as parts:
        layer = checked_layer(exchange, plan, arguments, options)
        new = layer.new
        assert new is not None
        parts += new.rows
        parts.shared_memory = shared_digest(host, "attend", arguments.k_cache, arguments.v_cache)
        terms["options"] = layer.inputs.digest()
    rows = [x.unflatten(1, (layer.num_kv_heads, -1)) for x in new.rows]

    shared: SharedRows | None = None

    def begin(heads: slice, buffer: int) -> ArrivingRows | None:
        own = [x[:, heads].flatten(1) for x in rows]
        if shared is not None:
            return shared.begin(own, buffer)
        return exchange.begin_rows("attend", plan.rows_per_rank, own, buffer)

    def compute(heads: slice, arriving: ArrivingRows | None) -> None:
        if shared is not None:
            shared.finish(arriving, heads)
        elif arriving is not None:
            by_heads = (heads.stop - heads.start, -1)
            new.store_heads(
                heads, new.slots, [x.unflatten(1, by_heads) for x in exchange.arrived(arriving)]
            )
        _attend(layer, heads, outputs)

    with exchange.without_return():
        outputs = HeadOutputs(layer)
        most = plan.num_tokens - min(plan.rows_per_rank)  # rows that a rank receives
        if host is not None and parts.shared_memory:
            shared = SharedRows("attend", exchange, host, plan, new)
            shared.write_own()
            most = most_received(host.rails.hosts, plan.rows_per_rank)
        received = most * sum(x.shape[1] * x.element_size() for x in new.rows)
        side_by_side(head_rounds(layer.num_kv_heads, received, layer.flops), begin, compute)
        return arguments.outputs(*outputs.rows())


def _attend(layer: RankLayer[ContextParallelPlan], heads: slice, outputs: HeadOutputs) -> None:
    """Attend with some KV heads, to a copy in which their rows are adjacent.

    In a cache the rows of one head are far apart: every second row is in another memory page, and
    reading them again for each block of queries takes a sixth longer.
    """
    plan, inputs = layer.plan, layer.inputs
    caches, tables = [inputs.k[:, heads], inputs.v[:, heads]], plan.block_tables
    in_order = inputs.options.has_token_scales  # scales are in the order of the cache
    if heads.stop - heads.start < layer.num_kv_heads and not in_order:
        pages, tables = plan.pages_in_order
        caches = [
            take_rows(cache.unflatten(0, (-1, plan.page_size)), pages).flatten(0, 1)
            for cache in caches
        ]
    outputs.attend(heads, tables, caches)
