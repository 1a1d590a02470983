# SPDX-License-Identifier: Apache-2.0
"""Layers with more than causal attention, on the ranks of a group and in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cpattn
from cpattn.distributed import ContextParallel
from support.cases import dense, packed

STRATEGIES = ("zigzag", "interleave", "contiguous")
EXTENDS, PREFIXES, PAGE = (13, 1, 30, 0), (20, 3, 33, 9), 8
LENGTHS = [new + cached for new, cached in zip(EXTENDS, PREFIXES, strict=True)]
TABLES = np.array(
    [[9, 4, 1, 7, 2, -1, -1, -1], [0, *[-1] * 7], [3, 5, 6, 8, 10, 11, 12, 13], [14, 15, *[-1] * 6]]
)
SLOTS, HEADS, KV_HEADS, DIM = 16 * PAGE, 4, 2, 32
LATENT, ROPE, VALUE, INDEX, TOPK = 48, 16, 32, 32, 6


def random_masks() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.random((n, length)) < 0.5 for n, length in zip(EXTENDS, LENGTHS, strict=True)]


@dataclass(frozen=True)
class Layer:
    """Options of `attend` and of `plan`."""

    attend: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
LAYERS = {
    "window and sinks": Layer({"window": 6, "sinks": SINKS}),
    "softcap": Layer({"softcap": 2.0}),
    "not causal": Layer({"causal": False}),
    "mask": Layer(plan={"custom_mask": dense(random_masks())}),
    "bits, not causal": Layer({"causal": False}, {"packed_custom_mask": packed(random_masks())}),
    "mask and padding": Layer(
        {"causal": False},
        {"custom_mask": torch.from_numpy(dense(random_masks())), "num_tokens": 50},
    ),
    "physical padding": Layer({"window": 9}, {"pad_to_physical": True}),
}


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def new_slots() -> torch.Tensor:
    """The pool row of each new token."""
    return torch.tensor(
        [
            TABLES[s, position // PAGE] * PAGE + position % PAGE
            for s, (new, cached) in enumerate(zip(EXTENDS, PREFIXES, strict=True))
            for position in range(cached, cached + new)
        ]
    )


class Rank:
    """The pools of one rank, into which new tokens come by `write_kv` alone."""

    def __init__(self, strategy: str, **options: Any) -> None:
        assert dist.group.WORLD is not None
        self.cp = ContextParallel(dist.group.WORLD, strategy=strategy, page_size=PAGE)
        self.plan = self.cp.plan(EXTENDS, LENGTHS, block_tables=TABLES, **options)

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        padding = self.plan.num_tokens - len(x)
        x = torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])
        return self.cp.shard(self.plan, x)

    def write(self, *caches: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Pools that hold what these do, the new tokens sent by their ranks."""
        rows = [None if cache is None else self.shard(cache[new_slots()]) for cache in caches]
        pools = [None if cache is None else cache.clone() for cache in caches]
        for pool in pools:
            if pool is not None:
                pool[new_slots()] = torch.nan
        self.cp.write_kv(self.plan, rows[0], rows[1], pools[0], pools[1])
        return pools

    def gather(self, *results: torch.Tensor) -> list[torch.Tensor]:
        return [self.cp.gather(self.plan, result)[: sum(EXTENDS)] for result in results]


def dense_inputs() -> list[torch.Tensor]:
    return tensors(1, (sum(EXTENDS), HEADS, DIM), *[(SLOTS, KV_HEADS, DIM)] * 2)


def latent_inputs() -> list[torch.Tensor]:
    new = sum(EXTENDS)
    shapes = [(new, HEADS, LATENT), (new, HEADS, ROPE), (SLOTS, 1, LATENT), (SLOTS, 1, ROPE)]
    return tensors(2, *shapes)


def index_inputs() -> list[torch.Tensor]:
    new = sum(EXTENDS)
    return tensors(3, (new, 2, INDEX), (new, 2), (SLOTS, 1, INDEX))


def run_layers(rank: int) -> dict[str, list[torch.Tensor]]:
    """out and lse of every layer and strategy, of all tokens in their order."""
    results = {}
    for strategy in STRATEGIES:
        for name, layer in LAYERS.items():
            q, k, v = dense_inputs()
            one = Rank(strategy, **layer.plan)
            pools = one.write(k, v)
            out, lse = one.cp.attend(
                one.plan, one.shard(q), *pools, **layer.attend, return_lse=True
            )
            results[f"{strategy}: {name}"] = one.gather(out, lse)
        results |= {f"{strategy}: {name}": x for name, x in _run_latents(strategy).items()}
    return results


def _run_latents(strategy: str) -> dict[str, list[torch.Tensor]]:
    one = Rank(strategy)
    q, q_rope, latents, ropes = latent_inputs()
    index_q, weights, index_keys = index_inputs()
    cache, rope_cache = one.write(latents, ropes)
    apart = one.cp.attend(
        one.plan, one.shard(q), cache, None, q_rope=one.shard(q_rope), k_rope=rope_cache,
        v_head_dim=VALUE, window=20, scale=0.2, return_lse=True,
    )  # fmt: skip
    cache, _ = one.write(torch.cat([latents, ropes], -1), None)
    whole_q = one.shard(torch.cat([q, q_rope], -1))
    whole = one.cp.attend(
        one.plan, whole_q, cache, None, v_head_dim=VALUE, window=20, scale=0.2, return_lse=True
    )
    cache, index_cache = one.write(torch.cat([latents, ropes], -1), index_keys)
    assert index_cache is not None
    sparse = one.cp.attend_sparse(
        one.plan, whole_q, cache, one.shard(index_q), index_cache.view(-1, PAGE, INDEX),
        one.shard(weights), topk=TOPK, sm_scale=0.2, d_v=VALUE, return_lse=True,
    )  # fmt: skip
    return {
        "latents, rope apart": one.gather(*apart),
        "latents": one.gather(*whole),
        "sparse": one.gather(*sparse),
    }


def alone(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a layer by one process without context parallelism."""
    sizes = {"q_lens": EXTENDS, "kv_lens": LENGTHS, "block_tables": TABLES, "page_size": PAGE}
    common = {**sizes, "batch_invariant": True, "return_lse": True}
    if name in LAYERS:
        masks = {key: x for key, x in LAYERS[name].plan.items() if "mask" in key}
        return cpattn.paged_attention(*dense_inputs(), **common, **LAYERS[name].attend, **masks)
    q, q_rope, latents, ropes = latent_inputs()
    q, cache = torch.cat([q, q_rope], -1), torch.cat([latents, ropes], -1)
    if name == "sparse":
        index_q, weights, index_keys = index_inputs()
        metadata = cpattn.build_cp_metadata(
            EXTENDS, LENGTHS, cp_rank=0, cp_size=1, strategy="contiguous"
        )
        return cpattn.sparse.cp_sparse_mla(
            q, cache, index_q, index_keys.view(-1, PAGE, INDEX), weights, metadata,
            block_tables=TABLES, page_size=PAGE, topk=TOPK, sm_scale=0.2, d_v=VALUE,
            return_lse=True,
        )  # fmt: skip
    return cpattn.paged_attention(q, cache, cache[..., :VALUE], **common, window=20, scale=0.2)
