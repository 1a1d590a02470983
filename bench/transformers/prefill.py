# SPDX-License-Identifier: Apache-2.0
"""A prompt, and a chunk of one behind cached tokens: the time to the logits of the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from bench.harness.comparison import Comparison, times_as_fast
from bench.transformers import THREADS
from bench.transformers.models import (
    OURS,
    PEER,
    Agreement,
    attention_gflop,
    attention_of,
    model,
    prompt,
)

#: New tokens, and cached ones before them.
SHAPES = ((512, 0), (2048, 0), (8192, 0), (2048, 6144))


def comparisons(quick: bool) -> Iterator[Comparison]:
    for shape in ((24, 0), (8, 16)) if quick else SHAPES:
        alone = {
            name: attention_of(prefill(model(quick, 1), name, *shape), name)
            for name in (OURS, PEER)
        }
        yield comparison(quick, "layer", shape, alone)
        whole = {name: prefill(model(quick), name, *shape) for name in (OURS, PEER)}
        yield comparison(quick, "model", shape, whole)


def prefill(network: Any, implementation: str, new: int, cached: int) -> Callable[[], torch.Tensor]:
    tokens, config = prompt(new), network.config
    shape = 1, config.num_key_value_heads, cached, config.head_dim
    generator = torch.Generator().manual_seed(2)
    before = [torch.randn(shape, generator=generator).bfloat16() for _ in network.model.layers]
    cache = DynamicCache(config=config)
    for layer, keys in enumerate(before):
        cache.update(keys, keys.flip(2), layer)

    def run() -> torch.Tensor:
        config._attn_implementation = implementation
        with torch.inference_mode():
            result = network(tokens, past_key_values=cache, logits_to_keep=1)
        cache.crop(cached - cache.get_seq_length())
        logits: torch.Tensor = result.logits[0]
        return logits

    return run


def comparison(
    quick: bool,
    kind: str,
    shape: tuple[int, int],
    implementations: dict[str, Callable[[], torch.Tensor]],
) -> Comparison:
    new, cached = shape
    layers = model(quick).model.layers
    work = attention_gflop(model(quick).config, new, cached)
    if kind == "model":
        weights = sum(p.numel() for p in layers.parameters())
        work = len(layers) * work + 2e-9 * new * weights
    job = {"model": "prefill", "layer": "attention of a layer"}[kind]
    return Comparison(
        "prefill",
        {"job": job, "tokens": new, "cached": cached, "threads": THREADS},
        implementations,
        Agreement(kind),
        (work, "GFLOP"),
        (new, "token"),
        (times_as_fast(OURS, PEER, 1, PEER),),
    )
