# SPDX-License-Identifier: Apache-2.0
"""The measured model, the calls of its attention, and the comparison of results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from bench.harness import accuracy
from bench.harness.comparison import Wrong
from cpattn.integrations import transformers as integration

OURS, PEER = "cpattn", "sdpa"
LAYERS, VOCABULARY = 24, 4096


@cache
def model(quick: bool, num_layers: int = LAYERS) -> Any:
    """16 heads on 8 key-value heads of 64 in each layer; half a billion weights in bfloat16."""
    integration.register(OURS)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64 if quick else 1024,
        intermediate_size=96 if quick else 5120,
        num_hidden_layers=2 if quick and num_layers > 2 else num_layers,
        vocab_size=VOCABULARY,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=16 if quick else 64,
        max_position_embeddings=1 << 14,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, length), generator=generator)


def attention_of(run: Callable[[], Any], implementation: str) -> Callable[[], torch.Tensor]:
    """The attention function alone, with the arguments of its call in `run` with most queries.

    `run` is the call of a model with one layer.
    """
    interface = AttentionInterface()
    calls: list[tuple[int, int, tuple[Any, ...], dict[str, Any]]] = []
    function = interface[implementation]

    def recorded(module: Any, query: torch.Tensor, *tensors: Any, **kwargs: Any) -> Any:
        calls.append((query.shape[2], len(calls), (module, query, *tensors), dict(kwargs)))
        return function(module, query, *tensors, **kwargs)

    AttentionInterface.register(implementation, recorded)
    try:
        run()
    finally:
        AttentionInterface.register(implementation, function)
    *_, arguments, keywords = max(calls, key=itemgetter(0, 1))

    def attend() -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = function(*arguments, **keywords)[0]
        return out.flatten(0, 1).flatten(1)

    return attend


def attention_gflop(config: Any, new: int, cached: int) -> float:
    """Gflop of one layer: four for each visible pair of query and key, and dimension."""
    pairs = new * cached + new * (new + 1) // 2
    return 4e-9 * pairs * config.num_attention_heads * config.head_dim


class Agreement:
    """A check that results equal the first one except for roundings."""

    def __init__(self, kind: str) -> None:
        self._bound = accuracy.TRANSFORMERS[kind]
        self._expected: torch.Tensor | None = None

    def __call__(self, name: str, result: torch.Tensor) -> float:
        """The largest relative error of a row."""
        result = result.float()
        if self._expected is None:
            self._expected = result.clone()
        difference = (result - self._expected).norm(dim=-1) / self._expected.norm(dim=-1)
        error = float(difference.max())
        if not error <= self._bound:
            raise Wrong(f"relative error {error:.2g}")
        return error
