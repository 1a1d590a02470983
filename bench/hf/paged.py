# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: prompts of several lengths, prefilled in chunks, and tokens after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from comparison import Comparison, Wrong, times_as_fast
from hf import THREADS
from hf.models import OURS, PEER, Agreement, attention_of, model, prompt

PROMPTS, NEW, CHUNK, PAGE_SIZE = (1600, 800, 400, 200), 8, 1024, 16
QUICK_PROMPTS, QUICK_NEW, QUICK_CHUNK = (30, 10), 3, 16
#: What the model's configuration calls them.
NAMES = {OURS: f"{OURS}_flash", PEER: PEER}


def comparisons(quick: bool) -> Iterator[Comparison]:
    lengths, new = (QUICK_PROMPTS, QUICK_NEW) if quick else (PROMPTS, NEW)
    tokens = sum(lengths) + new * len(lengths)
    case = {"prompts": len(lengths), "tokens": tokens, "threads": THREADS}
    bars = (times_as_fast(OURS, PEER, 1, PEER),)
    alone = {name: attention_of(serve(model(quick, 1), name, quick), NAMES[name]) for name in NAMES}
    chunk = QUICK_CHUNK if quick else CHUNK
    yield Comparison(
        "paged",
        {"job": "paged attention of a layer"} | case,
        alone,
        Agreement("layer"),
        (1e-9 * chunk, "Gtoken"),
        (chunk, "token"),
        bars,
    )
    yield Comparison(
        "paged",
        {"job": "continuous batching"} | case,
        {name: serve(model(quick), name, quick) for name in NAMES},
        SameTokens(),
        (1e-9 * tokens, "Gtoken"),
        (tokens, "token"),
        bars,
    )


def serve(network: Any, name: str, quick: bool) -> Callable[[], torch.Tensor]:
    """Generates for all prompts; returns the tokens, [prompts, new]."""
    lengths, new, chunk = (
        (QUICK_PROMPTS, QUICK_NEW, QUICK_CHUNK) if quick else (PROMPTS, NEW, CHUNK)
    )
    prompts = [prompt(length, seed)[0].tolist() for seed, length in enumerate(lengths)]
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=sum(length // PAGE_SIZE + 2 for length in lengths),
        max_batch_tokens=chunk,
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

    Roundings may decide between two tokens, and all that follow are others then.
    """

    def __init__(self) -> None:
        self._expected: torch.Tensor | None = None

    def __call__(self, name: str, tokens: torch.Tensor) -> float:
        if self._expected is None:
            self._expected = tokens
        error = float((tokens[:, 0] != self._expected[:, 0]).float().mean())
        if error > 0.25:
            raise Wrong(f"{error:.0%} of the first tokens are others")
        return error
