# SPDX-License-Identifier: Apache-2.0
"""Ranks whose KV pools hold a share of the keys each: prefills, layers and decode steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import cpattn
from cpattn.distributed import ContextParallel, DecodePlan
from cpattn.distributed.layers import ring, rounds
from cpattn.kv import PageInterleave, TokenInterleave
from support.distributed import layer_worker as layers
from support.distributed.distributed_worker import make_plan
from support.distributed.prefill_batches import Case, make_batch

# By name: of so many ranks and pages of so many tokens.
PLACEMENTS: dict[str, Callable[[int, int], Any]] = {
    "pages": lambda size, page: PageInterleave(shard_size=size, page_size=page),
    "tokens": lambda size, page: TokenInterleave(shard_size=size, interleave=1),
    "halves of pages": lambda size, page: TokenInterleave(shard_size=size, interleave=page // 2),
}
# As many rounds as there are KV heads.
ROUNDS = {"_LEAST_BYTES": 1, "_MOST_FLOPS_PER_BYTE": 1 << 60}


@dataclass(frozen=True)
class Run:
    """A case, where its keys are, and how they meet queries."""

    case: Case
    placement: str
    exchange: str

    def __str__(self) -> str:
        return f"{self.exchange}, {self.placement}, {self.case.name}"


def shard_of(placement: Any, rank: int, pool: torch.Tensor, page_size: int) -> torch.Tensor:
    """What the pool of a rank holds of a pool that holds everything."""
    slots = np.arange(len(pool))
    mine = placement.owner_of(slots) == rank
    rows = placement.local_index(slots)
    num_rows = -(-(int(rows.max()) + 1) // page_size) * page_size
    unread = torch.nan if pool.is_floating_point() else 77
    shard = pool.new_full((num_rows, *pool.shape[1:]), unread)
    shard[rows[mine]] = pool[slots[mine]]
    return shard


def run_prefill(run: Run, group: Any = None) -> dict[str, Any]:
    """What came out on this rank, and whether its shards are those of the whole pools."""
    case, batch = run.case, make_batch(run.case)
    size, rank = dist.get_world_size(), dist.get_rank()
    placement = PLACEMENTS[run.placement](size, case.page_size)
    cp = ContextParallel(
        dist.group.WORLD if group is None else group,
        strategy=case.strategy,
        page_size=case.page_size,
        placement=placement,
        exchange=run.exchange,
    )
    plan = make_plan(cp, case, batch)
    q, k, v = (
        cp.shard(plan, x) for x in (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    )
    shards = [
        shard_of(placement, rank, pool, case.page_size) for pool in (batch.k_cache, batch.v_cache)
    ]
    cp.write_kv(plan, k, v, *shards)
    out, lse = cp.attend(plan, q, *shards, return_lse=True)
    whole = ContextParallel(dist.group.WORLD, strategy=case.strategy, page_size=case.page_size)
    replicated = make_plan(whole, case, batch)
    whole.write_kv(replicated, k, v, batch.k_cache, batch.v_cache)
    expected = whole.attend(replicated, q, batch.k_cache, batch.v_cache, return_lse=True)
    written = [
        shard_of(placement, rank, pool, case.page_size) for pool in (batch.k_cache, batch.v_cache)
    ]
    real = slice(0, sum(case.extend_lens))
    gathered = [cp.gather(plan, x)[real] for x in (out, lse)]
    return {
        "out": gathered[0],
        "lse": gathered[1],
        "padding": out[plan.num_local_rows :],
        "same bits": all(
            torch.equal(one, cp.gather(plan, x)[real])
            for one, x in zip(gathered, expected, strict=True)
        ),
        "shards": all(
            torch.equal(shard.nan_to_num(9), pool.nan_to_num(9))
            for shard, pool in zip(shards, written, strict=True)
        ),
        "kv_counts": plan.kv_counts,
    }


def run_prefills(rank: int, runs: list[Run]) -> dict[str, dict[str, Any]]:
    return {str(run): run_prefill(run) for run in runs}


class ShardedRank(layers.Rank):
    """A rank of the layers' batch whose pools hold a share each."""

    def __init__(
        self, strategy: str, placement: str, exchange: str, *, group: Any = None, **options: Any
    ) -> None:
        assert dist.group.WORLD is not None
        self.placement = PLACEMENTS[placement](dist.get_world_size(), layers.PAGE)
        self.cp = ContextParallel(
            dist.group.WORLD if group is None else group,
            strategy=strategy,
            page_size=layers.PAGE,
            placement=self.placement,
            exchange=exchange,
        )
        self.plan = self.cp.plan(
            layers.EXTENDS, layers.LENGTHS, block_tables=layers.TABLES, **options
        )

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        return super().shard(x) if x.is_floating_point() else self.cp.shard(self.plan, x)

    def write(self, *caches: torch.Tensor | None) -> list[torch.Tensor | None]:
        rows = [
            None if cache is None else self.shard(cache[layers.new_slots()]) for cache in caches
        ]
        pools: list[torch.Tensor | None] = []
        for cache in caches:
            if cache is None:
                pools.append(None)
                continue
            whole = cache.clone()
            whole[layers.new_slots()] = torch.nan if whole.is_floating_point() else 77
            pools.append(shard_of(self.placement, self.cp.cp_rank, whole, layers.PAGE))
        assert rows[0] is not None
        assert pools[0] is not None
        self.cp.write_kv(self.plan, rows[0], rows[1], pools[0], pools[1])
        return pools


def run_layers(rank: int, exchanges: list[str], group: Any = None) -> dict[str, list[torch.Tensor]]:
    """out and lse of all tokens, for every layer, placement and exchange."""
    results = {}
    for exchange in exchanges:
        for placement in PLACEMENTS:
            for name, layer in layers.LAYERS.items():
                q, k, v = layers.dense_inputs()
                one = ShardedRank("zigzag", placement, exchange, group=group, **layer.plan)
                out = one.cp.attend(
                    one.plan, one.shard(q), *one.write(k, v), **layer.attend, return_lse=True
                )
                results[f"{exchange}, {placement}, {name}"] = one.gather(*out)
            for name, inputs in coded_inputs().items():
                if name.startswith("codes, scales of tokens") and exchange != "pass_q":
                    continue
                one = ShardedRank("zigzag", placement, exchange, group=group)
                q, keys, apart = one.shard(inputs["q"]), inputs["k_cache"], {}
                if name.endswith("rope apart"):
                    split = [keys.shape[-1] - 16, 16]
                    q, q_rope = q.split(split, dim=-1)
                    keys, ropes = (x.contiguous() for x in keys.split(split, dim=-1))
                    apart = {"q_rope": q_rope, "k_rope": one.write(ropes, None)[0]}
                pools = one.write(keys, inputs["v_cache"])
                scales = {
                    key: shard_of(one.placement, rank, inputs[key], layers.PAGE)
                    if inputs[key].ndim > 1
                    else inputs[key]
                    for key in ("k_scale", "v_scale")
                }
                out = one.cp.attend(one.plan, q, *pools, **scales, **apart, return_lse=True)
                results[f"{exchange}, {placement}, {name}"] = one.gather(*out)
            one = ShardedRank("zigzag", placement, exchange, group=group)
            for name, out in _run_latents(one).items():
                results[f"{exchange}, {placement}, {name}"] = one.gather(*out)
    return results


def coded_inputs() -> dict[str, dict[str, torch.Tensor]]:
    """Queries, caches of codes, and scales of heads or of tokens."""
    draw = torch.Generator().manual_seed(4)
    q, *_ = layers.dense_inputs()
    shape = (layers.SLOTS, layers.KV_HEADS, layers.DIM)
    codes = [torch.randint(-128, 128, shape, generator=draw).to(torch.int8) for _ in "kv"]
    inputs = {"q": q, "k_cache": codes[0], "v_cache": codes[1]}
    of_heads = torch.tensor([0.01, 0.02])
    of_tokens = 0.01 + 0.01 * torch.rand(shape[:2], generator=draw)
    with_tokens = inputs | {"k_scale": of_tokens, "v_scale": of_tokens / 2}
    return {
        "codes, scales of heads": inputs | {"k_scale": of_heads, "v_scale": of_heads.flip(0)},
        "codes, scales of tokens": with_tokens,
        "codes, scales of tokens, rope apart": with_tokens,
    }


def _run_latents(one: ShardedRank) -> dict[str, list[torch.Tensor]]:
    q, q_rope, latents, ropes = layers.latent_inputs()
    cache, _ = one.write(torch.cat([latents, ropes], -1), None)
    options = {"v_head_dim": layers.VALUE, "window": 20, "scale": 0.2, "return_lse": True}
    whole_q = one.shard(torch.cat([q, q_rope], -1))
    results = {"latents": one.cp.attend(one.plan, whole_q, cache, None, **options)}
    cache, rope_cache = one.write(latents, ropes)
    results["latents, rope apart"] = one.cp.attend(
        one.plan, one.shard(q), cache, None, q_rope=one.shard(q_rope), k_rope=rope_cache, **options
    )
    return results


@dataclass(frozen=True)
class Step:
    """A decode step of requests with so many keys, of which the last are new."""

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    latent: bool = False
    masked: bool = False
    rope_apart: bool = False  # the last 16 of 48 dimensions of keys
    options: tuple[tuple[str, Any], ...] = ()

    def attend_options(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 2, self.num_heads)
        return {name: sinks if name == "sinks" else value for name, value in self.options}

    def inputs(self) -> dict[str, Any]:
        """Those of `paged_attention` over pools that hold everything."""
        draw = torch.Generator().manual_seed(sum(self.kv_lens))
        pages = [-(-n // self.page_size) for n in self.kv_lens]
        tables = torch.full((len(pages), max(pages)), -1)
        ids = torch.randperm(sum(pages) + 3, generator=draw)
        for row, n in zip(tables, pages, strict=True):
            row[:n], ids = ids[:n], ids[n:]
        shape = ((sum(pages) + 3) * self.page_size, self.num_kv_heads)
        kv_heads = 1 if self.latent else self.num_kv_heads
        k = torch.randn(shape[0], kv_heads, 48, generator=draw).to(self.dtype)
        v = torch.randn(shape[0], kv_heads, 32, generator=draw).to(self.dtype)
        q = torch.randn(sum(self.q_lens), self.num_heads, 48, generator=draw).to(self.dtype)
        masks = {}
        if self.masked:
            bits = sum(n * length for n, length in zip(self.q_lens, self.kv_lens, strict=True))
            masks["custom_mask"] = torch.rand(bits, generator=draw) < 0.7
        return {
            "q": q,
            "k_cache": k,
            "v_cache": k[..., :32] if self.latent else v,
            "q_lens": list(self.q_lens),
            "kv_lens": list(self.kv_lens),
            "block_tables": tables,
            "page_size": self.page_size,
            **masks,
            **self.attend_options(),
        }


def run_steps(rank: int, steps: list[Step]) -> dict[str, dict[str, Any]]:
    """out and lse of every step and placement; new tokens come into the pools by `write_kv`."""
    results = {}
    for step in steps:
        for name in PLACEMENTS:
            cp, plan, queries, shards = written_step(rank, step, name)
            out, lse = cp.decode(
                plan, k_shard=shards[0], v_shard=shards[1], return_lse=True,
                v_head_dim=32 if step.latent else None, **queries, **step.attend_options(),
            )  # fmt: skip
            results[f"{name}, {step.name}"] = {"out": out, "lse": lse}
    return results


def written_step(
    rank: int, step: Step, placement_name: str
) -> tuple[ContextParallel, DecodePlan, dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """A step whose new tokens are in the shards of this rank; queries, and what is apart."""
    inputs = step.inputs()
    placement = PLACEMENTS[placement_name](dist.get_world_size(), step.page_size)
    cp = ContextParallel(dist.group.WORLD, page_size=step.page_size, placement=placement)
    plan = cp.plan_decode(
        step.kv_lens, q_lens=step.q_lens, block_tables=inputs["block_tables"],
        custom_mask=inputs.get("custom_mask"),
    )  # fmt: skip
    queries = {"q": inputs["q"]}
    pools = [inputs["k_cache"], None if step.latent else inputs["v_cache"]]
    if step.rope_apart:
        parts = (x.contiguous() for x in inputs["q"].split([32, 16], dim=-1))
        queries = dict(zip(("q", "q_rope"), parts, strict=True))
        pools[0], ropes = (x.contiguous() for x in inputs["k_cache"].split([32, 16], dim=-1))
        queries["k_rope"] = shard_of(placement, rank, ropes, step.page_size)
    slots = torch.tensor(plan.slots)
    shards: list[torch.Tensor | None] = []
    rows: list[torch.Tensor | None] = []
    for pool in pools:
        if pool is None:
            shards.append(None)
            rows.append(None)
            continue
        before = pool.clone()
        before[slots] = torch.nan
        shards.append(shard_of(placement, rank, before, step.page_size))
        rows.append(pool[slots])
    cp.write_kv(plan, *rows, *shards)
    return cp, plan, queries, shards


def alone(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The same step in one process that has all keys."""
    result: tuple[torch.Tensor, torch.Tensor] = cpattn.paged_attention(
        **step.inputs(), batch_invariant=True, return_lse=True
    )
    return result


def run_traffic(rank: int, case: Case) -> dict[str, dict[str, Any]]:
    """Of each exchange what this rank received, and the order of events."""
    exchanges = ("pass_q", "gather", "all_to_all", "ring")
    return {exchange: _traffic_of(rank, case, exchange) for exchange in exchanges}


def traffic_rank(
    rank: int, case: Case, exchange: str
) -> tuple[ContextParallel, Any, list[torch.Tensor], list[torch.Tensor]]:
    """A rank that holds pages: its plan, its rows of q, k, v, and its shards without new keys."""
    batch, size = make_batch(case), dist.get_world_size()
    cp = ContextParallel(
        dist.group.WORLD,
        page_size=case.page_size,
        placement=PLACEMENTS["pages"](size, case.page_size),
        exchange=exchange,
    )
    plan = make_plan(cp, case, batch)
    tokens = (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    shards = [
        shard_of(cp.placement, rank, pool, case.page_size)
        for pool in (batch.k_cache, batch.v_cache)
    ]
    return cp, plan, [cp.shard(plan, x) for x in tokens], shards


def _traffic_of(rank: int, case: Case, exchange: str) -> dict[str, Any]:
    cp, plan, (q, k, v), shards = traffic_rank(rank, case, exchange)
    events: list[str] = []
    received = {"write_kv": 0, "attend": 0}
    post, finish, attend_part = cp._exchange.post, cp._exchange.finish, ring.attend_part

    def counted(call: str, sends: Any, receives: Any) -> Any:
        if call in received:
            received[call] += sum(x.numel() * x.element_size() for x in receives.values())
            events.append("post")
        return post(call, sends, receives)

    def finished(posted: Any) -> None:
        if posted.call in received:
            events.append("finish")
        finish(posted)

    def computed(*arguments: Any, **options: Any) -> Any:
        events.append("compute")
        return attend_part(*arguments, **options)

    cp._exchange.post, cp._exchange.finish = counted, finished
    cp.write_kv(plan, k, v, *shards)
    events.clear()
    by_heads = mock.patch.multiple(rounds, **ROUNDS) if exchange == "ring" else nullcontext()
    with mock.patch.object(ring, "attend_part", computed), by_heads:
        cp.attend(plan, q, *shards)
    answer: dict[str, Any] = {"received": received, "events": events}
    answer["all bytes"] = cp.sent_bytes, cp.received_bytes
    answer["choice"] = cp.choose_exchange(
        plan, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim, element_bytes=4,
    ).received_bytes  # fmt: skip
    mine = plan.batch.owner == rank
    mine[plan.local_rows] = False
    answer["rows to write"] = int(mine.sum())
    return answer
