# SPDX-License-Identifier: Apache-2.0
"""Layers with masks, windows, codes and latents, on the ranks of a group and for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel, LayerCaches
from cpattn.distributed.layers import rounds
from support.cases import dense, packed
from support.distributed.prefill_batches import new_slots
from support.distributed.sharded_worker import (
    EXCHANGES,
    PLACEMENTS,
    ROUNDS,
    equal,
    shard_of,
    unread,
)
from support.pairwise import pairwise

STRATEGIES = ("zigzag", "interleave", "contiguous")
EXTENDS, PREFIXES, PAGE = (13, 1, 30, 0), (20, 3, 33, 9), 8
LENGTHS = [new + cached for new, cached in zip(EXTENDS, PREFIXES, strict=True)]
TABLES = np.array(
    [[9, 4, 1, 7, 2, -1, -1, -1], [0, *[-1] * 7], [3, 5, 6, 8, 10, 11, 12, 13], [14, 15, *[-1] * 6]]
)
SIZES = {"q_lens": EXTENDS, "kv_lens": LENGTHS, "block_tables": TABLES, "page_size": PAGE}
CHAINED = TABLES.copy()  # a request begins with a page that another one in the batch fills
CHAINED[2, 0] = TABLES[0, 3]
TOKENS, SLOTS, HEADS, KV_HEADS, DIM = sum(EXTENDS), 16 * PAGE, 4, 2, 32
LATENT, ROPE, VALUE = 48, 16, 32
NEW_SLOTS = new_slots(TABLES, PREFIXES, LENGTHS, PAGE)
NUM_LAYERS = 3  # layers of a model


def random_masks() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.random((n, length)) < 0.5 for n, length in zip(EXTENDS, LENGTHS, strict=True)]


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


@dataclass(frozen=True)
class Layer:
    """Queries and whole caches, and options of `attend` and of `plan`."""

    q: torch.Tensor
    caches: tuple[torch.Tensor | None, ...]  # keys, values, rotary dimensions of keys
    attend: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    q_rope: torch.Tensor | None = None
    windows: tuple[int | None, ...] = ()  # windows of a model's layers, if they differ
    tables: np.ndarray = field(default_factory=lambda: TABLES)

    def of_model(self, number: int) -> Layer:
        """Return a layer with other caches, different in every row."""
        caches = tuple(None if x is None else x.roll(number, 0) for x in self.caches)
        window = {"window": self.windows[number]} if self.windows else {}
        return replace(self, caches=caches, attend=self.attend | window)

    def inputs(self) -> dict[str, Any]:
        q, (k, v, ropes) = self.q, self.caches
        if self.q_rope is not None:
            q, k = torch.cat([q, self.q_rope], -1), torch.cat([k, ropes], -1)
        v = k[..., :VALUE] if v is None else v
        options = {name: value for name, value in self.attend.items() if name != "v_head_dim"}
        if any("mask" in name for name in self.plan):
            options["custom_mask"] = dense(random_masks())
        sizes = SIZES | {"block_tables": self.tables}
        return {"q": q, "k_cache": k, "v_cache": v, **sizes, **options}


def decoded(inputs: dict[str, Any]) -> dict[str, Any]:
    inputs = dict(inputs)
    for cache, name in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        if (scale := inputs.pop(name, None)) is not None:
            inputs[cache] = inputs[cache].double() * scale[..., None].double()
    return inputs


def _layers() -> dict[str, Layer]:
    q, k, v = tensors(1, (TOKENS, HEADS, DIM), *[(SLOTS, KV_HEADS, DIM)] * 2)
    plain = Layer(q, (k, v, None))
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    table, slopes = tensors(5, (HEADS, 33), (len(EXTENDS), HEADS))
    table[:, 0] = -torch.inf  # this hides distant keys
    (numbers,) = tensors(6, (len(EXTENDS), HEADS, max(EXTENDS), max(LENGTHS)))
    numbers[..., ::5] = -torch.inf
    numbers[0, :, 3:6, PAGE:] = -torch.inf  # all keys but those of one page
    numbers[2, :, 5:7] = -torch.inf  # all keys
    of_each = [
        x[:1, :new, :length].to(torch.bfloat16)
        for x, new, length in zip(numbers, EXTENDS, LENGTHS, strict=True)
    ]
    padded = {"custom_mask": torch.from_numpy(dense(random_masks())), "num_tokens": 50}
    found = {
        "plain": plain,
        "new tokens as a prefix": replace(plain, tables=CHAINED),
        "window and sinks": replace(plain, attend={"window": 6, "sinks": sinks}),
        "window on both sides": replace(plain, attend={"window": (6, 3), "causal": False}),
        "windows by turns": replace(plain, attend={"window": 5}, windows=(5, None, 0)),
        "alibi": replace(plain, attend={"alibi_slopes": slopes[0].abs(), "softcap": 2.0}),
        "alibi of requests, window": replace(
            plain, attend={"alibi_slopes": slopes, "window": (20, 9), "causal": False}
        ),
        "relative bias": replace(plain, attend={"relative_bias": table, "alibi_slopes": -slopes}),
        "bias, sinks, padding": replace(
            plain, attend={"bias": numbers, "sinks": sinks}, plan={"num_tokens": 50}
        ),
        "bias of each, alibi, window": replace(
            plain,
            attend={"bias": of_each, "alibi_slopes": slopes, "window": (20, 9), "causal": False},
        ),
        "softcap": replace(plain, attend={"softcap": 2.0}),
        "not causal": replace(plain, attend={"causal": False}),
        "mask": replace(plain, plan={"custom_mask": dense(random_masks())}),
        "bits, not causal": replace(
            plain, attend={"causal": False}, plan={"packed_custom_mask": packed(random_masks())}
        ),
        "mask and padding": replace(plain, attend={"causal": False}, plan=padded),
        "physical padding": replace(plain, attend={"window": 9}, plan={"pad_to_physical": True}),
    }
    draw = torch.Generator().manual_seed(4)
    codes = [torch.randint(-128, 128, k.shape, generator=draw).to(torch.int8) for _ in "kv"]
    of_heads = torch.tensor([0.01, 0.02])
    of_tokens = 0.01 + 0.01 * torch.rand(k.shape[:2], generator=draw)
    coded = replace(plain, caches=(*codes, None))
    found["codes, scales of heads"] = replace(
        coded, attend={"k_scale": of_heads, "v_scale": of_heads.flip(0)}
    )
    scales = {"k_scale": of_tokens, "v_scale": of_tokens / 2}
    found["codes, scales of tokens"] = replace(coded, attend=scales)
    (q, q_rope), (k, ropes) = (
        (x.contiguous() for x in x.split([DIM - ROPE, ROPE], -1)) for x in (q, codes[0])
    )
    found["codes, scales of tokens, rope apart"] = Layer(
        q, (k, codes[1], ropes), scales, q_rope=q_rope
    )
    shapes = [(TOKENS, HEADS, LATENT), (TOKENS, HEADS, ROPE), (SLOTS, 1, LATENT), (SLOTS, 1, ROPE)]
    q, q_rope, k, ropes = tensors(2, *shapes)
    options = {"v_head_dim": VALUE, "window": 20, "scale": 0.2}
    whole = torch.cat([q, q_rope], -1), (torch.cat([k, ropes], -1), None, None)
    return found | {
        "latents": Layer(*whole, options),
        "latents, rope apart": Layer(q, (k, None, ropes), options, q_rope=q_rope),
    }


LAYERS = _layers()


@dataclass(frozen=True)
class LayerRun:
    """Layer with an exchange and a placement of keys; without a placement, all ranks have them."""

    name: str
    exchange: str = "auto"
    placement: str | None = None
    strategy: str = "zigzag"

    def __str__(self) -> str:
        where = self.placement or "replicated"
        return f"{self.exchange}, {where}, {self.strategy}, {self.name}"

    @property
    def is_possible(self) -> bool:
        """Whether the exchange supports the layer: scales of tokens do not travel."""
        return self.exchange in ("auto", "pass_q") or "scales of tokens" not in self.name


SHARDED = [
    run
    for row in pairwise([*LAYERS], EXCHANGES, [*PLACEMENTS], STRATEGIES)
    if (run := LayerRun(*row)).is_possible
]
REPLICATED = [LayerRun(name, strategy=strategy) for name in LAYERS for strategy in STRATEGIES]


class Rank:
    def __init__(self, run: LayerRun, group: Any = None) -> None:
        options = {"strategy": run.strategy, "page_size": PAGE}
        if run.placement is not None:
            options["placement"] = PLACEMENTS[run.placement](dist.get_world_size(), PAGE)
            options["exchange"] = run.exchange
        self.layer = LAYERS[run.name]
        self.reads_own = run.placement is None or run.exchange in ("gather", "ring")
        self.cp = ContextParallel(group or dist.group.WORLD, **options)
        self.plan = self.cp.plan(
            EXTENDS, LENGTHS, block_tables=self.layer.tables, **self.layer.plan
        )

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        padding = self.plan.num_tokens - len(x)
        x = torch.cat([x, x.new_full((padding, *x.shape[1:]), unread(x))])
        return self.cp.shard(self.plan, x)

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole cache."""
        if self.cp.placement is None:
            return x
        return shard_of(self.cp.placement, self.cp.cp_rank, x, PAGE)

    def pools(self, layer: Layer) -> list[torch.Tensor | None]:
        """Return this rank's pools without the new tokens."""
        pools = [None if cache is None else cache.clone() for cache in layer.caches]
        for pool in pools:
            if pool is not None:
                pool[NEW_SLOTS] = unread(pool)
        return [None if pool is None else self.held(pool) for pool in pools]

    def own_numbers(self, bias: torch.Tensor) -> torch.Tensor:
        """Return a bias with only the rows of this rank's tokens."""
        metadata = self.plan.metadata
        requests = torch.tensor(metadata.query_request_indices, dtype=torch.int64)
        ends = torch.tensor(metadata.query_cache_lengths, dtype=torch.int64)
        rows = ends - 1 - torch.tensor(PREFIXES)[requests]
        own = torch.full_like(bias, torch.nan)
        own[requests, :, rows] = bias[requests, :, rows]
        return own

    def attend(
        self, layer: Layer, *, writes: bool = False, pools: Any = None, prefetched: Any = None
    ) -> list[torch.Tensor]:
        """Return out, LSE and pools of this rank; new rows are written before or by the call."""
        pools = self.pools(layer) if pools is None else pools
        new = [None if x is None else self.rows(x[NEW_SLOTS]) for x in layer.caches]
        options = dict(layer.attend)
        for name in ("k_scale", "v_scale"):
            if name in options and options[name].ndim > 1:
                options[name] = self.held(options[name])
        if isinstance(options.get("bias"), torch.Tensor) and self.reads_own:
            options["bias"] = self.own_numbers(options["bias"])
        if pools[2] is not None:
            self.cp.write_kv(self.plan, new[2], None, pools[2], None)
            options |= {"q_rope": self.rows(layer.q_rope), "k_rope": pools[2]}
        if writes and pools[2] is None:
            options |= {"k_local": new[0], "v_local": new[1]}
        else:
            self.cp.write_kv(self.plan, *new[:2], *pools[:2])
        if prefetched is not None:
            options["prefetched"] = prefetched
        results = self.cp.attend(
            self.plan, self.rows(layer.q), *pools[:2], return_lse=True, **options
        )
        own = slice(0, self.plan.num_local_rows)
        return [*(x[own] for x in results), *(pool for pool in pools if pool is not None)]

    def ahead(self, *, writes: bool) -> list[torch.Tensor]:
        """Attend in all layers of a model, with cached keys sent a layer ahead."""
        layers = [self.layer.of_model(number) for number in range(NUM_LAYERS)]
        pools = [self.pools(layer) for layer in layers]
        prefetched = self.cp.prefetch(
            self.plan,
            [
                LayerCaches(*of, window=layer.attend.get("window"))
                for of, layer in zip(pools, layers, strict=True)
            ],
        )
        found = []
        for layer, of in zip(layers, pools, strict=True):
            found += self.attend(layer, writes=writes, pools=of, prefetched=prefetched)
        assert prefetched.next_layer == NUM_LAYERS
        return found


def run_layer(run: LayerRun, group: Any = None, *, ahead: bool = True) -> dict[str, Any]:
    """Return out and LSE of all tokens, and whether other ways have the same bits."""
    rank = Rank(run, group)
    results = rank.attend(rank.layer)
    with mock.patch.multiple(rounds, **ROUNDS):
        ways = {"one call": equal(results, rank.attend(rank.layer, writes=True))}
    if ahead and run.exchange == "gather" and rank.layer.tables is not CHAINED:
        layers = [rank.layer.of_model(number) for number in range(NUM_LAYERS)]
        expected = [x for layer in layers for x in rank.attend(layer)]
        for writes, how in ((True, ROUNDS), (False, {"_MOST_ROUNDS": 8})):
            with mock.patch.multiple(rounds, **how):
                ways[f"ahead, {writes}"] = equal(rank.ahead(writes=writes), expected)
    out, lse = (rank.cp.gather(rank.plan, x)[:TOKENS] for x in results[:2])
    return {"out": out, "lse": lse, "ways": ways}


def run_layers(
    rank: int, runs: list[LayerRun], make_group: Any = lambda: None
) -> dict[LayerRun, dict[str, Any]]:
    group = make_group()
    return {run: run_layer(run, group) for run in runs}
