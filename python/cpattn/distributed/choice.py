# SPDX-License-Identifier: Apache-2.0
"""Which exchange suits a batch: the one by which the busiest rank receives the fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .heads import LayerSizes, head_shares
from .sharded_plan import ShardedPlan


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
    {'pass_q': 0, 'gather': 0, 'ring': 0, 'all_to_all': 0}
    >>> dist.destroy_process_group()
    """

    exchange: str
    reason: str
    received_bytes: dict[str, int]


def choose(plan: ShardedPlan, sizes: LayerSizes, *, in_place: bool = False) -> ExchangeChoice:
    """See ContextParallel.choose_exchange; `in_place` leaves out what reads shards as they are."""
    received = _received_bytes(plan, sizes)
    size = plan.placement.shard_size
    named = ["gather", "all_to_all", "pass_q"]  # of equal ones the first; these have exact bits
    if sizes.num_heads % size or (sizes.num_kv_heads % size and size % sizes.num_kv_heads):
        named.remove("all_to_all")
    if in_place:
        named.remove("pass_q")
    name = min(named, key=lambda each: received[each])
    others = ", ".join(f"{each} {received[each]}" for each in named if each != name)
    reason = f"a rank receives at most {received[name]} bytes, by {others}"
    if "all_to_all" not in named:
        reason += f"; {sizes.num_heads} and {sizes.num_kv_heads} heads are uneven on {size} ranks"
    scratch = _scratch_bytes(plan, sizes)
    if name == "gather" and scratch > plan.max_scratch_bytes:
        name = "ring"
        reason += f"; a KV head takes {scratch} bytes, more than max_scratch_bytes"
    return ExchangeChoice(name, reason, received)


def _scratch_bytes(plan: ShardedPlan, sizes: LayerSizes) -> int:
    """What "gather" needs for one KV head, as keys arrive and in their places."""
    return 2 * sum(plan.kv_counts) * _key_bytes(sizes)


def _key_bytes(sizes: LayerSizes) -> int:
    """Of the key and value of a token in one KV head."""
    return (sizes.head_dim + (0 if sizes.shares_values else sizes.v_head_dim)) * sizes.kv_bytes


def _received_bytes(plan: ShardedPlan, sizes: LayerSizes) -> dict[str, int]:
    """Of the rank that receives most, for each exchange."""
    counts, rows, tokens = plan.kv_counts, plan.rows_per_rank, plan.num_tokens
    size = len(counts)
    q = sizes.head_dim * sizes.q_bytes  # of a row of one head
    out = sizes.v_head_dim * sizes.q_bytes + 4  # with the LSE
    key = _key_bytes(sizes)
    num_heads = sizes.num_heads
    others = [sum(counts) - count for count in counts]
    everything = max(others) * sizes.num_kv_heads * key
    by_heads = [
        (tokens - rows[rank]) * share.num_heads * q
        + others[rank] * (share.kv.stop - share.kv.start) * key
        + rows[rank] * (num_heads - share.num_heads) * out
        for rank, share in enumerate(head_shares(num_heads, sizes.num_kv_heads, size))
    ]
    return {
        "pass_q": max(
            (tokens - n) * num_heads * q + (size - 1) * n * num_heads * out for n in rows
        ),
        "gather": everything,
        "ring": everything,
        "all_to_all": max(by_heads),
    }
