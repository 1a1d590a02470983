# SPDX-License-Identifier: Apache-2.0
"""Choice of the exchange of a batch, by the core's row counts of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ... import _core
from ..plans.sharded_plan import DecodePlan, ShardedPlan


@dataclass(frozen=True)
class ExchangeChoice:
    """Exchange that "auto" takes for a layer, with the reason.

    Attributes
    ----------
    exchange : str
        Name of the exchange.
    reason : str
        Sizes that decided.
    received_bytes : dict of str to int
        For each exchange, the bytes that the busiest rank receives in one layer.

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


class SparseSizes(NamedTuple):
    """Sizes that decide the communicated bytes of a layer of sparse attention."""

    topk: int
    query_bytes: int  # of a token, in all heads
    result_bytes: int  # of a token in all heads, with the LSE
    asking_bytes: int  # of the indexer's queries and weights for a token
    latent_bytes: int  # of a key
    index_key_bytes: int  # of a key of the indexer, with its scale


def choose(
    plan: ShardedPlan, layer: _core.LayerBytes, *, window: int | None = None, writes: bool = False
) -> ExchangeChoice:
    """Choose for ContextParallel.choose_exchange."""
    held, most = plan.held_rows(window), plan.max_scratch_bytes
    return ExchangeChoice(*_core.choose_exchange(held, layer, plan.mesh, writes, most))


def choose_state_exchange(
    plan: DecodePlan, layer: _core.LayerBytes, out_heads: str
) -> ExchangeChoice:
    """Choose for the partial results of a decode step."""
    batch = plan.num_tokens, layer.num_heads, layer.output, plan.placement.shard_size
    return ExchangeChoice(*_core.choose_state_exchange(*batch, out_heads == "all"))


def choose_sparse(plan: ShardedPlan, sizes: SparseSizes) -> ExchangeChoice:
    """Choose for ContextParallel.choose_sparse_exchange."""
    rows = plan.kv_counts, plan.rows_per_rank, plan.batch.visible_keys
    return ExchangeChoice(*_core.choose_sparse_exchange(*rows, sizes, plan.max_scratch_bytes))
