# SPDX-License-Identifier: Apache-2.0
"""`attend` that writes new rows, too, beside `write_kv` and `attend`, on the ranks of a group."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import rounds
from cpattn.kv import MHATokenToKVPool
from support.distributed import layer_worker as layers
from support.distributed.layer_worker import LAYERS, PAGE, STRATEGIES, Layer
from support.distributed.prefill_batches import Case
from support.distributed.sharded_worker import (
    PLACEMENTS,
    ROUNDS,
    coded_inputs,
    shard_of,
    traffic_rank,
)

EXCHANGES = ("gather", "pass_q", "ring", "all_to_all")
Tensors = list[torch.Tensor | None]


class Rank:
    """A rank of the layers' batch, whose pools hold everything or a share."""

    def __init__(self, plan: dict[str, Any], **options: Any) -> None:
        self.cp = ContextParallel(dist.group.WORLD, page_size=PAGE, **options)
        self.plan = self.cp.plan(layers.EXTENDS, layers.LENGTHS, block_tables=layers.TABLES, **plan)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        padding = self.plan.num_tokens - len(x)
        unread = torch.nan if x.is_floating_point() else 77
        x = torch.cat([x, x.new_full((padding, *x.shape[1:]), unread)])
        return self.cp.shard(self.plan, x)

    def pools(self, *caches: torch.Tensor | None) -> Tensors:
        """Without the new tokens."""
        pools: Tensors = []
        for cache in caches:
            if cache is not None:
                cache = cache.clone()
                cache[layers.new_slots()] = torch.nan if cache.is_floating_point() else 77
                if self.cp.placement is not None:
                    cache = shard_of(self.cp.placement, self.cp.cp_rank, cache, PAGE)
            pools.append(cache)
        return pools

    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        if scale.ndim == 1 or self.cp.placement is None:
            return scale
        return shard_of(self.cp.placement, self.cp.cp_rank, scale, PAGE)

    def both_ways(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, **options: Any
    ) -> bool:
        """Whether one call, head after head, has the bits of two of all heads, and their pools."""
        new = [None if x is None else self.rows(x[layers.new_slots()]) for x in (k, v)]
        expected_pools, pools = self.pools(k, v), self.pools(k, v)
        q = self.rows(q)
        self.cp.write_kv(self.plan, *new, *expected_pools)
        expected = self.cp.attend(self.plan, q, *expected_pools, return_lse=True, **options)
        with mock.patch.multiple(rounds, **ROUNDS):
            out = self.cp.attend(
                self.plan, q, *pools, k_local=new[0], v_local=new[1], return_lse=True, **options
            )
        own = slice(0, self.plan.num_local_rows)
        pairs = [(a[own], b[own]) for a, b in zip(out, expected, strict=True)]
        pairs += [
            (a.nan_to_num(9), b.nan_to_num(9))
            for a, b in zip(pools, expected_pools, strict=True)
            if a is not None and b is not None
        ]
        return all(torch.equal(a, b) for a, b in pairs)


def layers_both_ways(rank: Rank, *, scales_of_tokens: bool) -> dict[str, bool]:
    """Of a rank without options of its plan: latents, and codes of 8 bits."""
    answers = {}
    for name, inputs in coded_inputs().items():
        if name.startswith("codes, scales of tokens") and not scales_of_tokens:
            continue
        scales = {key: rank.scale(inputs[key]) for key in ("k_scale", "v_scale")}
        answers[name] = rank.both_ways(inputs["q"], inputs["k_cache"], inputs["v_cache"], **scales)
    q, q_rope, latents, ropes = layers.latent_inputs()
    answers["latents"] = rank.both_ways(
        torch.cat([q, q_rope], -1), torch.cat([latents, ropes], -1), None,
        v_head_dim=layers.VALUE, window=20, scale=0.2,
    )  # fmt: skip
    return answers


def run_all(rank: int) -> dict[str, bool]:
    """Whether one call gives the bits of two, by case."""
    answers = {}
    plain = {"plain": Layer()}
    for strategy in STRATEGIES:
        for name, layer in (plain | LAYERS).items():
            one = Rank(layer.plan, strategy=strategy)
            answers[f"{strategy}, {name}"] = one.both_ways(*layers.dense_inputs(), **layer.attend)
    for name, same in layers_both_ways(Rank({}), scales_of_tokens=True).items():
        answers[f"replicated, {name}"] = same
    for exchange in EXCHANGES:
        for placement, make in PLACEMENTS.items():
            options = {"placement": make(dist.get_world_size(), PAGE), "exchange": exchange}
            for name, layer in (plain | LAYERS).items():
                answers[f"{exchange}, {placement}, {name}"] = Rank(layer.plan, **options).both_ways(
                    *layers.dense_inputs(), **layer.attend
                )
            others = layers_both_ways(Rank({}, **options), scales_of_tokens=exchange == "pass_q")
            for name, same in others.items():
                answers[f"{exchange}, {placement}, {name}"] = same
    answers["shared memory"] = _in_shared_memory()
    return answers


def _in_shared_memory() -> bool:
    """The same with a pool of all ranks."""
    cp = ContextParallel(dist.group.WORLD, page_size=PAGE)
    plan = cp.plan(layers.EXTENDS, layers.LENGTHS, block_tables=layers.TABLES)
    q, k, v = layers.dense_inputs()
    results = []
    for writes in (False, True):
        pool = MHATokenToKVPool(
            size=layers.SLOTS - PAGE, page_size=PAGE, num_layers=1, num_kv_heads=layers.KV_HEADS,
            head_dim=layers.DIM, dtype="float32", memory=cp.shared_memory(),
        )  # fmt: skip
        caches = [x.view(layers.SLOTS, layers.KV_HEADS, layers.DIM) for x in pool.get_kv_buffer(0)]
        for cache, filled in zip(caches, (k, v), strict=True):
            cached = torch.ones(layers.SLOTS, dtype=torch.bool)
            cached[layers.new_slots()] = False
            if cp.cp_rank == 0:
                cache[cached] = filled[cached]
        dist.barrier()
        new = {
            f"{name}_local": cp.shard(plan, x[layers.new_slots()])
            for name, x in (("k", k), ("v", v))
        }
        if not writes:
            cp.write_kv(plan, *new.values(), *caches)
            new = {}
        results.append((cp.attend(plan, cp.shard(plan, q), *caches, **new), *caches))
        dist.barrier()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def run_traffic(rank: int, case: Case) -> dict[str, Any]:
    """What one call with "gather" receives, and in what order it does what."""
    cp, plan, (q, k, v), shards = traffic_rank(rank, case, "gather")
    events: list[str] = []
    received = 0
    post, finish = cp._exchange.post, cp._exchange.finish

    def posted(call: str, sends: Any, receives: Any) -> Any:
        nonlocal received
        if call == "attend":
            received += sum(x.numel() * x.element_size() for x in receives.values())
            events.append("post")
        return post(call, sends, receives)

    def finished(posts: Any) -> None:
        if posts.call == "attend":
            events.append("finish")
        finish(posts)

    cp._exchange.post, cp._exchange.finish = posted, finished
    with mock.patch.multiple(rounds, **ROUNDS):
        cp.attend(plan, q, *shards, k_local=k, v_local=v)
    choice = cp.choose_exchange(
        plan, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
        element_bytes=4, writes=True,
    )  # fmt: skip
    return {"events": events, "received": received, "choice": choice.received_bytes["gather"]}
