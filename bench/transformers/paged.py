# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: prompts of several lengths, prefilled in chunks, and tokens after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.harness import accuracy
from bench.harness.comparison import Comparison, Wrong, times_as_fast
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

#: What the configuration of a model calls them.
NAMES = {OURS: f"{OURS}_flash", PEER: PEER}
BARS = (times_as_fast(OURS, PEER, 1, PEER),)


@dataclass(frozen=True)
class Load:
    """Prompts, new tokens for each, and the most tokens of a forward pass."""

    lengths: tuple[int, ...]
    new: int
    chunk: int
    page_size: int = 16


def comparisons(quick: bool) -> Iterator[Comparison]:
    yield last_chunk(model(quick, 1), Load((48,), 1, 16) if quick else Load((3072,), 1, 1024))
    load = Load((30, 10), 3, 16) if quick else Load((1600, 800, 400, 200), 8, 1024)
    tokens = sum(load.lengths) + load.new * len(load.lengths)
    yield Comparison(
        "paged",
        {
            "job": "continuous batching",
            "prompts": len(load.lengths),
            "tokens": tokens,
            "threads": THREADS,
        },
        {name: serve(model(quick), name, load) for name in NAMES},
        SameTokens(),
        (tokens, "token"),
        (tokens, "token"),
        BARS,
    )


def last_chunk(network: Any, load: Load) -> Comparison:
    """Attention alone, with its write into the cache, of a single prompt's last chunk."""
    cached = load.lengths[0] - load.chunk
    return Comparison(
        "paged",
        {
            "job": "paged attention of a layer",
            "tokens": load.chunk,
            "cached": cached,
            "threads": THREADS,
        },
        {name: attention_of(serve(network, name, load), NAMES[name]) for name in NAMES},
        Agreement("layer"),
        (attention_gflop(network.config, load.chunk, cached), "GFLOP"),
        (load.chunk, "token"),
        BARS,
    )


def serve(network: Any, name: str, load: Load) -> Callable[[], torch.Tensor]:
    """Generates for all prompts; returns the tokens, [prompts, new]."""
    prompts = [prompt(length, seed)[0].tolist() for seed, length in enumerate(load.lengths)]
    generation = GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(
        page_size=load.page_size,
        num_blocks=sum(length // load.page_size + 2 for length in load.lengths),
        max_batch_tokens=load.chunk,
        auto_switch_to_flash=False,
    )

    def run() -> torch.Tensor:
        network.config._attn_implementation = NAMES[name]
        results = network.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        return torch.tensor([result.generated_tokens for result in results.values()])

    return run


class SameTokens:
    """A check that most first tokens are those of the first result.

    Roundings may decide between two tokens, and all later tokens then differ.
    """

    def __init__(self) -> None:
        self._expected: torch.Tensor | None = None

    def __call__(self, name: str, tokens: torch.Tensor) -> float:
        if self._expected is None:
            self._expected = tokens
        error = float((tokens[:, 0] != self._expected[:, 0]).float().mean())
        if error > accuracy.FIRST_TOKENS:
            raise Wrong(f"{error:.0%} of the first tokens are others")
        return error
