# SPDX-License-Identifier: Apache-2.0
"""One layer with latents, dense (DeepSeek-V3) and sparse (V3.2), behind cached tokens.

Dimensions are those of DeepSeek-V3 with 16 of its 128 heads; the feed-forward part is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config, DynamicCache

from bench.harness.comparison import Bar, Comparison, times_as_fast
from bench.transformers import THREADS
from bench.transformers.models import OURS, PEER, VOCABULARY, Agreement, prompt
from cpattn.integrations import transformers as integration
from cpattn.integrations.transformers import absorb_mla, use_indexer

CONFIGS = {"MLA": DeepseekV3Config, "DSA": DeepseekV32Config}
CACHED, CHUNK, TOPK = 8192, 256, 2048
QUICK_CACHED, QUICK_CHUNK, QUICK_TOPK = 48, 4, 16
#: A token behind 8192 would have to expand them all, so anything less is a mistake.
BARS = {1: 5, CHUNK: 1}


def comparisons(quick: bool) -> Iterator[Comparison]:
    cached, chunk = (QUICK_CACHED, QUICK_CHUNK) if quick else (CACHED, CHUNK)
    for kind in CONFIGS:
        for new in (1, chunk):
            bars: tuple[Bar, ...] = (times_as_fast(OURS, PEER, BARS.get(new, 0), PEER),)
            yield Comparison(
                "latents",
                {"job": f"a layer of {kind}", "tokens": new, "cached": cached, "threads": THREADS},
                {name: layer(kind, quick, name, new, cached) for name in (OURS, PEER)},
                Agreement("layer"),
                (new, "token"),
                (new, "token"),
                bars,
            )


@cache
def model(kind: str, quick: bool) -> Any:
    """The model, with its latents absorbed and its indexer replaced, both under cpattn only."""
    integration.register(OURS)
    torch.manual_seed(0)
    sparse = {"index_topk": QUICK_TOPK if quick else TOPK} if kind == "DSA" else {}
    config = CONFIGS[kind](
        hidden_size=128 if quick else 2048,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=1,
        vocab_size=VOCABULARY,
        **sparse,
    )
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    absorb_mla(network, OURS)
    if kind == "DSA":
        use_indexer(network, OURS)
    return network


def layer(
    kind: str, quick: bool, implementation: str, new: int, cached: int
) -> Callable[[], torch.Tensor]:
    """The attention layer with its projections, on top of random latents."""
    network, tokens = model(kind, quick), prompt(new)
    config = network.config
    generator = torch.Generator().manual_seed(2)
    cache = DynamicCache(config=config)
    latent, rope = (
        torch.randn(1, 1, cached, dim, generator=generator).bfloat16()
        for dim in (config.kv_lora_rank, config.qk_rope_head_dim)
    )
    cache.update(latent, rope, 0)
    if kind == "DSA":
        keys = torch.randn(1, cached, config.index_head_dim, generator=generator).bfloat16()
        cache.update_indexer(keys, 0)

    def run() -> torch.Tensor:
        config._attn_implementation = implementation
        with torch.inference_mode():
            result = network.model(tokens, past_key_values=cache)
        cache.crop(-new)
        out: torch.Tensor = result.last_hidden_state[0]
        return out

    return run
