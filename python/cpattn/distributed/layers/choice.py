# SPDX-License-Identifier: Apache-2.0
"""Which exchange suits a batch: the one of the fewest bytes, as which merging counts, too."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ..plans.heads import LayerSizes, head_shares
from ..plans.mesh import Mesh
from ..plans.sharded_plan import DecodePlan, ShardedPlan
from .decode_states import LSE_BYTES, received_bytes

# What such a wire moves while one thread merges an element of a partial result (2.7 ns), about.
MERGE_BYTES = 3
ROUND_BYTES = 256 << 10  # what a wire of 1 to 3 GB/s moves while ranks wait for another round


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


def choose(plan: ShardedPlan, sizes: LayerSizes, *, writes: bool = False) -> ExchangeChoice:
    """See ContextParallel.choose_exchange."""
    received = _received_bytes(plan, sizes, writes=writes)
    size = plan.placement.shard_size
    named = ["gather", "all_to_all", "pass_q"]  # of equal ones the first; these have exact bits
    if not sizes.are_even(size):
        named.remove("all_to_all")
    if plan.mesh is not None and sizes.are_even(len(plan.mesh[0])):
        named.insert(-1, "usp")
    merging = _merge_bytes(plan, sizes)
    cost = {each: received[each] + merging.get(each, 0) for each in named}
    name = min(named, key=lambda each: cost[each])
    others = ", ".join(f"{each} {received[each]}" for each in named if each != name)
    reason = f"a rank receives at most {received[name]} bytes, by {others}"
    told = [f"{each} {merging[each]}" for each in named if each in merging]
    reason += f"; merging counts as bytes, too: {', '.join(told)}"
    if "all_to_all" not in named:
        reason += f"; {sizes.num_heads} and {sizes.num_kv_heads} heads are uneven on {size} ranks"
    scratch = _scratch_bytes(plan, sizes)
    if name == "gather" and scratch > plan.max_scratch_bytes:
        name = "ring"
        reason += f"; a KV head takes {scratch} bytes, more than max_scratch_bytes"
    return ExchangeChoice(name, reason, received)


def choose_state_exchange(plan: DecodePlan, sizes: LayerSizes, out_heads: str) -> ExchangeChoice:
    """The same of the partial results of a decode step, where a second round has its price."""
    received = received_bytes(plan.num_tokens, sizes, plan.placement.shard_size, out_heads)
    cost = dict(received)
    if out_heads == "all":
        cost["all_to_all"] += ROUND_BYTES
    name = min(cost, key=lambda each: cost[each])  # of equal ones "gather"
    others = ", ".join(f"{each} {count}" for each, count in received.items() if each != name)
    reason = f"a rank receives at most {received[name]} bytes, by {others}"
    if cost["all_to_all"] > received["all_to_all"]:
        reason += f"; all_to_all takes a second round, which is worth {ROUND_BYTES} bytes"
    return ExchangeChoice(name, reason, received)


def _scratch_bytes(plan: ShardedPlan, sizes: LayerSizes) -> int:
    """What "gather" needs for a KV head: arriving for the next round, arrived, in their places."""
    copies = 2 if sizes.num_kv_heads == 1 else 3
    return copies * sum(plan.kv_counts) * _key_bytes(sizes)


def _key_bytes(sizes: LayerSizes) -> int:
    """Of the key and value of a token in one KV head."""
    return (sizes.head_dim + (0 if sizes.shares_values else sizes.v_head_dim)) * sizes.kv_bytes


def _received_bytes(plan: ShardedPlan, sizes: LayerSizes, *, writes: bool) -> dict[str, int]:
    """Of the rank that receives most, for each exchange."""
    counts, rows, tokens = plan.kv_counts, plan.rows_per_rank, plan.num_tokens
    size = len(counts)
    q = sizes.head_dim * sizes.q_bytes  # of a row of one head
    out = sizes.v_head_dim * sizes.q_bytes + LSE_BYTES
    key = _key_bytes(sizes)
    row = sizes.num_kv_heads * key
    num_heads = sizes.num_heads
    others = [sum(counts) - count for count in counts]
    gathered = _counts_with_new_apart(plan) if writes else counts
    received = {
        "pass_q": [(tokens - n) * num_heads * q + (size - 1) * n * num_heads * out for n in rows],
        "gather": [(sum(gathered) - n) * row for n in gathered],
        "ring": [n * row for n in others],
        "all_to_all": [
            (tokens - rows[rank]) * share.num_heads * q
            + others[rank] * (share.kv.stop - share.kv.start) * key
            + rows[rank] * (num_heads - share.num_heads) * (out - LSE_BYTES)
            for rank, share in enumerate(head_shares(num_heads, sizes.num_kv_heads, size))
        ],
    }
    if plan.mesh is not None:
        received["usp"] = _by_mesh(plan, plan.mesh, sizes)
    written = [n * row if writes else 0 for n in _rows_to_write(plan)]
    return {
        name: max(of_ranks if name == "gather" else map(sum, zip(of_ranks, written, strict=True)))
        for name, of_ranks in received.items()
    }


def _merge_bytes(plan: ShardedPlan, sizes: LayerSizes) -> dict[str, int]:
    """As what merging counts, on the rank that merges most, where partial results are merged."""
    element = MERGE_BYTES * sizes.v_head_dim
    most = max(plan.rows_per_rank) * sizes.num_heads
    counts = {"pass_q": len(plan.rows_per_rank) * most * element}
    if plan.mesh is not None:
        parts = 0
        for row in plan.mesh:
            tokens = sum(plan.rows_per_rank[rank] for rank in row)
            shares = head_shares(sizes.num_heads, sizes.num_kv_heads, len(row))
            parts = max(parts, tokens * max(share.num_heads for share in shares))
        counts["usp"] = len(plan.mesh) * parts * element
    return counts


def _rows_to_write(plan: ShardedPlan) -> list[int]:
    """The new rows that each rank keeps of what others compute."""
    bounds = np.cumsum((0, *plan.rows_per_rank))
    owner = plan.batch.owner
    return [
        int((owner == rank).sum() - (owner[begin:end] == rank).sum())
        for rank, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]


def _counts_with_new_apart(plan: ShardedPlan) -> list[int]:
    """The rows that each rank sends where those of its new tokens come from itself."""
    return [
        count - new + own
        for count, new, own in zip(
            plan.kv_counts, _new_counts(plan), plan.rows_per_rank, strict=True
        )
    ]


def _new_counts(plan: ShardedPlan) -> list[int]:
    """The new keys of the batch that each rank keeps."""
    shares = plan.batch.shares
    prefixes = np.asarray(plan.metadata.prefix_lens, np.int64)
    requests = np.arange(len(prefixes))
    return [
        int((shares.counts(rank) - shares.count_below(rank, requests, prefixes)).sum())
        for rank in range(plan.placement.shard_size)
    ]


def _by_mesh(plan: ShardedPlan, mesh: Mesh, sizes: LayerSizes) -> list[int]:
    """What each rank receives by "usp", without the rest of pages on the ring."""
    q, out = sizes.head_dim * sizes.q_bytes, sizes.v_head_dim * sizes.q_bytes + LSE_BYTES
    rows, counts = plan.rows_per_rank, plan.kv_counts
    received = [0] * len(rows)
    for row in mesh:
        tokens = sum(rows[rank] for rank in row)
        shares = head_shares(sizes.num_heads, sizes.num_kv_heads, len(row))
        for rank, share in zip(row, shares, strict=True):
            num_kv_heads = share.kv.stop - share.kv.start
            received[rank] += (tokens - rows[rank]) * share.num_heads * q
            received[rank] += (sum(counts) - counts[rank]) * num_kv_heads * _key_bytes(sizes)
            received[rank] += rows[rank] * (sizes.num_heads - share.num_heads) * out
    return received
