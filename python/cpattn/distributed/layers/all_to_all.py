# SPDX-License-Identifier: Apache-2.0
"""Attention split by heads: a rank attends with some heads of all rows, as in DeepSpeed's Ulysses.

Queries go to the ranks of their heads, keys and values to the ranks that read them, outputs back to
the rows. The bits are those of a pool that holds all keys. With fewer KV heads than ranks, several
ranks have the same KV head.

The KV heads of a rank go in rounds: some arrive while the previous ones are computed. New keys
first go to the ranks that keep them, in the same way. Scratch of a rank: queries of the heads of
two rounds; their keys and values for the whole context, as sent, as received, and one round of them
in place; results, as sent, as received, and joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _core
from ...attention import paged_attention
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from ..transport.waiting import Posted
from .key_scratch import key_scratch
from .layer import RankLayer
from .partials import ShardInputs
from .rounds import head_rounds, side_by_side
from .rows import put_rows
from .sharded_write import Heads, OwnerRoutes, Routed

Part = list[_core.HeadShare]  # some heads of each rank


class _Arriving(NamedTuple):
    """Queries of this rank's heads of a part, and the keys that they read, on their way."""

    q: torch.Tensor
    kv: list[torch.Tensor]
    posted: list[Posted]


def attend(layer: RankLayer[ShardedPlan]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention of this rank's rows, and their LSE if requested; write new keys."""
    exchange, plan, inputs, return_lse = (
        layer.exchange, layer.plan, layer.inputs, layer.return_lse
    )  # fmt: skip
    rank, tokens, rows_per_rank = exchange.rank, plan.gathered_rows, list(plan.rows_per_rank)
    num_heads = inputs.q.shape[1]
    dims = [inputs.v.shape[2], *[1] * return_lse]
    results = [
        inputs.q.new_empty(plan.num_local_rows, num_heads, dim, dtype=dtype)
        for dim, dtype in zip(dims, (inputs.q.dtype, torch.float32), strict=False)
    ]
    returning: list[tuple[Part, list[list[torch.Tensor]], list[Posted]]] = []
    parts = _parts(layer)
    routes = OwnerRoutes("attend", exchange, plan, layer.new, layer.num_kv_heads)
    new_keys = _NewKeys(routes, parts)

    def begin(part: Part, _: int) -> _Arriving:
        new_keys.store()  # their owners send them as keys from now on
        sends = [inputs.q[:, share.q].contiguous() for share in part]
        q = sends[0].new_empty(plan.num_tokens, part[rank].num_heads, inputs.q.shape[2])
        posted = _begin_swap(exchange, sends, q.split(rows_per_rank))
        kv, more = _begin_own_heads(exchange, plan, inputs, part)
        return _Arriving(q, kv, [posted, *more])

    def compute(part: Part, arriving: _Arriving) -> None:
        for posted in arriving.posted:
            exchange.finish(posted)
        taken = key_scratch(plan, inputs.options.left).filled(arriving.kv)
        of_tokens = _attend_tokens(
            plan, inputs, part[rank], arriving.q[tokens], taken, return_lse=return_lse
        )
        received, going = [], []
        for result in of_tokens:
            rows = torch.empty_like(result)
            put_rows([rows], tokens, [result])
            received.append(
                [
                    rows.new_empty(plan.num_local_rows, share.num_heads, rows.shape[2])
                    for share in part
                ]
            )
            going.append(_begin_swap(exchange, rows.split(rows_per_rank), received[-1]))
        returning.append((part, received, going))

    side_by_side(parts, begin, compute)
    for part, received, going in returning:
        for posted, whole, blocks in zip(going, results, received, strict=True):
            exchange.finish(posted)
            for share, block in zip(part, blocks, strict=True):
                whole[:, share.q] = block
    return results[0], results[1].squeeze(-1) if return_lse else None


class _NewKeys:
    """New keys on their way to their owners: the next part arrives while one is sent on."""

    def __init__(self, routes: OwnerRoutes, parts: Sequence[Part]) -> None:
        self._routes, self._coming = routes, iter(parts)
        self._routed = self._begin()

    def store(self) -> None:
        """Wait for the keys of each part in turn, and write them."""
        self._routes.store(self._routed)
        self._routed = self._begin()

    def _begin(self) -> Routed:
        part = next(self._coming, None)
        return None if part is None else self._routes.begin(_kv_heads(part))


def _kv_heads(part: Part) -> Heads:
    """Return the KV heads that some rank of a part reads."""
    heads = sorted({head for share in part for head in range(share.kv.start, share.kv.stop)})
    if heads[-1] - heads[0] + 1 == len(heads):
        return slice(heads[0], heads[-1] + 1)
    return heads


def _parts(layer: RankLayer[ShardedPlan]) -> list[Part]:
    """Return the heads of each round, the same on every rank."""
    plan, inputs, size = layer.plan, layer.inputs, layer.exchange.size
    sizes = inputs.sizes()
    shares = _core.share_heads(sizes.num_heads, sizes.num_kv_heads, size)
    row_bytes = sizes.num_heads * (sizes.query + sizes.output)
    kv_bytes = sum(plan.kv_counts) * sizes.num_kv_heads * inputs.head_bytes
    received = (plan.num_tokens * row_bytes + kv_bytes) * (size - 1) // size**2
    most = max(share.num_kv_heads for share in shares)
    return _core.split_shares(shares, len(head_rounds(most, received, layer.flops)))


def _begin_own_heads(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs, part: Part
) -> tuple[list[torch.Tensor], list[Posted]]:
    """Begin to gather keys and values of this rank's KV heads of a part, for the whole context."""
    scratch = key_scratch(plan, inputs.options.left)
    rows = scratch.sent_rows[exchange.rank]
    mine = part[exchange.rank]
    received = [
        inputs.k.new_empty(sum(scratch.counts), mine.num_kv_heads, dim) for dim in inputs.kv_dims
    ]
    sends = [inputs.take(rows, share.kv) for share in part]
    posted = [
        _begin_swap(exchange, [taken[i] for taken in sends], whole.split(scratch.counts))
        for i, whole in enumerate(received)
    ]
    return received, posted


def _attend_tokens(
    plan: ShardedPlan,
    inputs: ShardInputs,
    mine: _core.HeadShare,
    q: torch.Tensor,
    taken: list[torch.Tensor],
    *,
    return_lse: bool,
) -> list[torch.Tensor]:
    """Attend with this rank's heads of all tokens, in their order; the LSE is [.., heads, 1]."""
    options = inputs.options.of_heads(mine.kv, mine.q)
    values = inputs.values_of(taken)
    if not mine.num_heads:
        empty = [q.new_empty(len(q), 0, values.shape[2])]
        return [*empty, q.new_empty(len(q), 0, 1, dtype=torch.float32)] if return_lse else empty
    request = plan.batch.rows.request
    q_lens = np.bincount(request, minlength=len(plan.block_tables))
    result: Any = paged_attention(
        q, taken[0], values, q_lens=q_lens, kv_lens=q_lens + np.asarray(plan.metadata.prefix_lens),
        block_tables=key_scratch(plan, options.left).block_tables, page_size=plan.page_size,
        packed_custom_mask=plan.packed_custom_mask, batch_invariant=options.batch_invariant,
        return_lse=return_lse, **options.keywords(),
    )  # fmt: skip
    return [result[0], result[1][..., None]] if return_lse else [result]


def _begin_swap(
    exchange: RowExchange, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> Posted:
    """Begin to send each rank its tensor, and to receive one of each."""
    return begin_swap(exchange, dict(enumerate(sends)), dict(enumerate(receives)))


def begin_swap(
    exchange: RowExchange, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
) -> Posted:
    """Begin to send a tensor to each of some ranks and receive one from each; copy the own."""
    receives.pop(exchange.rank).copy_(sends.pop(exchange.rank))
    return exchange.post("attend", sends, receives)
