# SPDX-License-Identifier: Apache-2.0
"""Cached keys a layer ahead: the order and bytes of messages, and errors if ranks disagree."""

import gc
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel, LayerCaches
from cpattn.distributed.layers import gather_kv, rounds
from support.distributed.disagreements import ODD_RANK
from support.distributed.distributed_worker import error_of
from support.distributed.layer_worker import NUM_LAYERS
from support.distributed.prefill_batches import Case
from support.distributed.sharded_worker import ROUNDS, noted_events, traffic_rank

CASE = Case("three heads", (13, 40), (64, 7), num_heads=6, num_kv_heads=3)
ATTEND = (gather_kv.HeadOutputs, "attend")


def run_traffic(rank: int) -> dict[str, Any]:
    """Return the order of posts, waits and attention in three layers, and bytes of each call."""
    cp, plan, (q, k, v), shards = traffic_rank(rank, CASE, "gather")
    before, counts = 0, []

    def count() -> None:
        nonlocal before
        counts.append(cp.received_bytes - before)
        before = cp.received_bytes

    prefixes = cp.prefetch(plan, [tuple(shards)] * NUM_LAYERS)
    count()
    calls = ("attend", "attend (prefix)")
    with noted_events(cp, *calls, compute=ATTEND) as events, mock.patch.multiple(rounds, **ROUNDS):
        for _ in range(NUM_LAYERS):
            cp.attend(plan, q, *shards, k_local=k, v_local=v, prefetched=prefixes)
            count()
    return {
        "events": [f"{event.kind} {event.call}".strip() for event in events],
        "received": counts,
        "buffers": [
            x.numel() for key, x in cp._exchange._buffers.items() if isinstance(key, tuple)
        ],
        "buffer_bytes": prefixes.buffer_bytes,
        "widths": [_most_heads_at_once(rank, more) for more in (0, 1)],
    }


def _most_heads_at_once(rank: int, more: int) -> int:
    """Return how many KV heads are computed at once with the least scratch plus `more` heads."""
    cp, plan, (q, k, v), shards = traffic_rank(rank, CASE, "gather")
    row = (CASE.head_dim + CASE.v_head_dim) * 4
    slots = plan.page_size * int((plan.block_tables >= 0).sum())
    least = (2 * sum(CASE.prefixes) + plan.num_tokens) * CASE.num_kv_heads * row + slots * row
    cp.max_scratch_bytes = least + more * slots * row
    plan = cp.plan(CASE.extend_lens, CASE.seq_lens, block_tables=plan.block_tables)
    widths = []
    attend_heads = gather_kv.HeadOutputs.attend

    def attended(self: Any, heads: slice, *rest: Any) -> None:
        widths.append(heads.stop - heads.start)
        attend_heads(self, heads, *rest)

    prefixes = cp.prefetch(plan, [tuple(shards)])
    with mock.patch.object(*ATTEND, attended):
        cp.attend(plan, q, *shards, k_local=k, v_local=v, prefetched=prefixes)
    return max(widths)


def run_disagreements(rank: int) -> tuple[dict[str, str], bool]:
    """Disagree on rank 1; return the errors of ranks, and whether later layers are right."""
    told: dict[str, str] = {}
    is_odd = rank == ODD_RANK
    cp, plan, (q, k, v), shards = traffic_rank(rank, CASE, "gather")
    new = {"k_local": k, "v_local": v}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        if (error := error_of(call)[0]) != "no error":
            told[name] = error

    def prefetch(num_layers: int = NUM_LAYERS, **window: Any) -> Any:
        return cp.prefetch(plan, [LayerCaches(*shards, **window)] * num_layers)

    def attend(prefixes: Any, caches: list[torch.Tensor] = shards) -> torch.Tensor:
        return cp.attend(plan, q, *caches, **new, prefetched=prefixes)

    expected = attend(None)
    prefixes = prefetch()
    others = [x.clone() for x in shards]
    attempt("without", lambda: attend(None if is_odd else prefixes))
    attempt("other caches", lambda: attend(prefixes, others if is_odd else shards))
    attempt("attends", lambda: cp.attend(plan, q, *shards) if is_odd else prefetch())
    attempt("fewer layers", lambda: prefetch(2 if is_odd else 3))
    attempt("another window", lambda: prefetch(window=5 if is_odd else 6))
    attempt("refused", lambda: prefetch(0 if is_odd else 3))
    # No attempt sent keys: those in flight still belong to the first layer.
    right = torch.equal(attend(prefixes), expected)
    later = prefetch()  # this drops the rest of the first prefetch
    attempt("dropped", lambda: attend(prefixes))
    right &= torch.equal(attend(later), expected)
    right &= torch.equal(attend(None), expected)  # a layer without prefetch between two
    del prefixes, later, cp  # keys are still in flight
    cp, plan, (q, k, v), shards = traffic_rank(rank, CASE, "gather")
    prefixes = prefetch()
    for _ in range(NUM_LAYERS):
        right &= torch.equal(attend(prefixes, shards), expected)
    return told, right


def late_rows(post: Callable[..., Any]) -> Callable[..., Any]:
    """Return `post` that sends rows only after the other ranks have dropped theirs."""

    def late(call: str, *arguments: Any) -> Any:
        if "agreement" not in call:
            time.sleep(0.2)
        return post(call, *arguments)

    return late


def run_dropped(rank: int) -> bool:
    """Return whether calls are right after rows in flight for deleted objects."""
    large = Case("large", (4, 4), (5000, 100), "zigzag", 4, 8, 8, 64, 64)
    cp, plan, _, shards = traffic_rank(rank, large, "gather")
    if rank == ODD_RANK:
        cp._exchange.post = late_rows(cp._exchange.post)
    cp.prefetch(plan, [tuple(shards)])
    del cp
    gc.collect()
    plain = ContextParallel(dist.group.WORLD, page_size=4)
    plan = plain.plan([8], block_tables=[range(2)])
    rows = torch.arange(16.0).view(8, 2)
    return torch.equal(plain.gather(plan, plain.shard(plan, rows)), rows)
