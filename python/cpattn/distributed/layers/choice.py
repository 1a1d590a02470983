# SPDX-License-Identifier: Apache-2.0
"""Choice of the exchange of a batch: rows of a plan, for the rule of `exchanges`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...context_parallel.exchanges import (
    Held,
    Layer,
    cheapest,
    cheapest_states,
    received_bytes,
    received_state_bytes,
)
from ..plans.heads import LayerSizes
from ..plans.sharded_plan import DecodePlan, ShardedPlan


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange that "auto" takes for a layer, and why.

    Attributes
    ----------
    exchange : str
        Its name.
    reason : str
        The sizes that decided.
    received_bytes : dict of str to int
        What the rank that receives most receives in one layer, by each exchange.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import PageInterleave
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4,
    ...                      placement=PageInterleave(shard_size=1, page_size=4))
    >>> plan = cp.plan([3], [5], block_tables=[[2, 0]])
    >>> cp.choose_exchange(plan, num_heads=4, num_kv_heads=1, head_dim=64).received_bytes
    {'gather': 0, 'ring': 0, 'pass_q': 0, 'all_to_all': 0}
    >>> dist.destroy_process_group()
    """

    exchange: str
    reason: str
    received_bytes: dict[str, int]


def choose(
    plan: ShardedPlan, sizes: LayerSizes, *, window: int | None = None, writes: bool = False
) -> ExchangeChoice:
    """See ContextParallel.choose_exchange."""
    memo, key = plan.batch.memo, ("held", window)
    if key not in memo:
        memo[key] = _held(plan, window)
    layer, held = _layer(sizes), memo[key]
    mesh = None if plan.mesh is None else np.asarray(plan.mesh, np.int64)
    received = received_bytes(held, layer, mesh, writes=writes)
    name, reason = cheapest(held, layer, received, plan.max_scratch_bytes, mesh)
    return ExchangeChoice(name, reason, received)


def choose_state_exchange(plan: DecodePlan, sizes: LayerSizes, out_heads: str) -> ExchangeChoice:
    """Choose for the partial results of a decode step."""
    output, size = sizes.v_head_dim * sizes.q_bytes, plan.placement.shard_size
    received = received_state_bytes(plan.num_tokens, sizes.num_heads, output, size, out_heads)
    return ExchangeChoice(*cheapest_states(received, out_heads), received)


def _layer(sizes: LayerSizes) -> Layer:
    values = 0 if sizes.shares_values else sizes.v_head_dim
    return Layer(
        sizes.num_heads,
        sizes.num_kv_heads,
        query=sizes.head_dim * sizes.q_bytes,
        key=(sizes.head_dim + values) * sizes.kv_bytes,
        output=sizes.v_head_dim * sizes.q_bytes,
        merged=sizes.v_head_dim,
    )


def _held(plan: ShardedPlan, window: int | None) -> Held:
    tokens, owner = np.asarray(plan.rows_per_rank, np.int64), plan.batch.owner
    home = np.repeat(np.arange(len(tokens)), tokens)[: len(owner)]
    kept = np.bincount(owner[owner >= 0], minlength=len(tokens))
    at_home = np.bincount(owner[owner == home], minlength=len(tokens))
    shares, prefixes = plan.batch.shares, np.asarray(plan.metadata.prefix_lens, np.int64)
    requests = np.arange(len(prefixes))
    keys, unseen, cached = (
        np.array([shares.count_below(r, requests, below).sum() for r in range(len(tokens))])
        for below in (shares.kv_lens, plan.batch.first_seen(window), prefixes)
    )
    return Held(
        tokens=tokens,
        keys=keys,
        seen=keys - unseen,
        new_keys=keys - cached,
        arriving=kept - at_home,
    )
