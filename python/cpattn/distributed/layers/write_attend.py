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
from ..transport.row_bytes import ArrivingRows
from ..transport.terms import NO_TERMS
from .head_attention import HeadOutputs
from .layer import LayerArguments, RankLayer, checked_layer
from .partials import AttentionOptions
from .rounds import head_rounds, side_by_side
from .rows import NewRows, take_rows
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

    def begin(heads: slice, buffer: int) -> ArrivingRows:
        own = [x[:, heads].flatten(1) for x in rows]
        return exchange.begin_rows("attend", plan.rows_per_rank, own, buffer)

    def compute(heads: slice, arriving: ArrivingRows) -> None:
        num_heads = heads.stop - heads.start
        gathered = [x.unflatten(1, (num_heads, -1)) for x in exchange.arrived(arriving)]
        new.store_heads(heads, gathered)
        _attend(layer, heads, outputs)

    def begin_shared(heads: slice, buffer: int) -> ArrivingRows | None:
        return shared.begin([x[:, heads].flatten(1) for x in rows], buffer)

    def compute_shared(heads: slice, arriving: ArrivingRows | None) -> None:
        shared.finish(arriving, heads)
        _attend(layer, heads, outputs)

    with exchange.without_return():
        outputs = HeadOutputs(layer)
        if host is not None and parts.shared_memory:
            shared = SharedRows("attend", exchange, host, plan, new)
            shared.write_own()
            rounds = _rounds(layer, shared.most_received_bytes)
            side_by_side(rounds, begin_shared, compute_shared)
        else:
            side_by_side(_rounds(layer, _received_bytes(plan, new)), begin, compute)
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


def _received_bytes(plan: ContextParallelPlan, new: NewRows) -> int:
    """Return the most bytes that a rank receives, for private pools."""
    row_bytes = sum(x.shape[1] * x.element_size() for x in new.rows)
    return (plan.num_tokens - min(plan.rows_per_rank)) * row_bytes


def _rounds(layer: RankLayer[ContextParallelPlan], received_bytes: int) -> list[slice]:
    return head_rounds(layer.num_kv_heads, received_bytes, layer.flops)
