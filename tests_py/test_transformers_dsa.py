# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 and GLM-MoE-DSA of transformers, tiny and random, run on our operators.

Their eager attention folds the chosen keys into a dense mask. Ours sees the keys alone, and the
latents with the up-projections absorbed, as a serving engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DeepseekV32Config,
    DynamicCache,
    GlmMoeDsaConfig,
)
from transformers.masking_utils import sdpa_mask  # noqa: E402
from transformers.models.deepseek_v32 import modeling_deepseek_v32  # noqa: E402
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa  # noqa: E402

import cpattn  # noqa: E402

TOPK = 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "index_topk": TOPK,
    "index_head_dim": 32,
    "index_n_heads": 8,
    "initializer_range": 0.15,
}
CONFIGS = {
    "deepseek_v32": lambda: DeepseekV32Config(**SIZES),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(**SIZES, index_topk_pattern="FSF"),
}
LENGTH = 50
RUNS = {
    "prefill": ([LENGTH], None),
    "chunks": ([11, 19, 1, 19], None),
    "left padded": ([LENGTH], [0, 13, 47]),
}
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()


@torch.inference_mode()
def run(model: Any, name: str, implementation: str) -> Tensor:
    """Logits of all tokens that are not padding, [n, vocab]."""
    chunks, padding = RUNS[name]
    model.config._attn_implementation = implementation
    tokens = torch.randint(64, (len(padding or [0]), LENGTH), generator=seeded(5))
    mask = torch.arange(LENGTH) >= torch.tensor(padding or [0])[:, None]
    cache = DynamicCache(config=model.config)
    logits, begin = [], 0
    for length in chunks:
        end = begin + length
        positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
        result = model(
            tokens[:, begin:end],
            attention_mask=mask[:, :end].long() if padding else None,
            position_ids=positions,
            past_key_values=cache,
        )
        logits.append(result.logits)
        begin = end
    return torch.cat(logits, 1)[mask]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def watched_indexers(model: Any, see: Callable[..., None]) -> Iterator[None]:
    """`see(indexer, args, kwargs, chosen)` for every call of an indexer."""
    handles = [
        layer.self_attn.indexer.register_forward_hook(see, with_kwargs=True)
        for layer in model.model.layers
        if layer.self_attn.indexer is not None
    ]
    yield
    for handle in handles:
        handle.remove()


def index_inputs(indexer: Any, hidden: Tensor, q_resid: Tensor, rotation: Any, cache: Any) -> Any:
    """q [B, S, H, D], k [B, T, D] and weights [B, S, H] of an indexer, with all its factors."""
    rope = indexer.qk_rope_head_dim
    if type(indexer).__name__.startswith("Glm"):  # interleaved, where DeepSeek takes halves
        rotate = modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave
    else:
        rotate = modeling_deepseek_v32.apply_rotary_pos_emb
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1))
    q_rope, _ = rotate(q[..., :rope], q[..., :1, :rope], *rotation, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden) * (indexer.n_heads * indexer.head_dim) ** -0.5
    return (
        torch.cat([q_rope, q[..., rope:]], -1),
        cache.layers[indexer.layer_idx].indexer_keys,
        weights,
    )


def assert_same_keys(ours: Tensor, theirs: Tensor, scores: np.ndarray) -> None:
    """Equal sets, but for keys whose scores differ by roundings from the smallest chosen one."""
    assert len(set(ours)) == len(ours) == len(theirs)
    threshold = np.sort(scores)[-len(ours)] if len(ours) else 0.0
    odd = np.setxor1d(ours, theirs)
    np.testing.assert_allclose(scores[odd], threshold, rtol=0, atol=64 * EPS * np.abs(scores).max())


@pytest.mark.parametrize("name", RUNS)
def test_the_indexer_chooses_the_same_keys(model: Any, name: str) -> None:
    calls = 0

    def see(indexer: Any, args: Any, kwargs: Any, chosen: Tensor) -> None:
        nonlocal calls
        hidden, q_resid, rotation, mask = args[:4]
        q, k, weights = index_inputs(indexer, hidden, q_resid, rotation, kwargs["past_key_values"])
        for b in range(len(q)):
            # What a row may see is a range, also behind padding; rows of padding see nothing.
            visible = mask[b] >= 0
            seen = visible.sum(1).int()
            begin = torch.where(seen > 0, visible.int().argmax(1), 0).int()
            arguments = q[b].contiguous(), k[b], weights[b], begin, begin + seen
            logits = cpattn.indexer_logits(*arguments).numpy()
            keys = cpattn.indexer_topk(*arguments, topk=TOPK).numpy()
            assert not np.isfinite(logits[~visible.numpy()]).any()
            for i in range(len(keys)):
                ours = keys[i][keys[i] >= 0] + int(begin[i])
                assert len(ours) == min(TOPK, int(seen[i]))
                theirs = chosen[b, i].numpy()
                theirs = theirs[visible[i].numpy()[theirs]]  # a short row names others, too
                assert_same_keys(ours, theirs, np.where(visible[i], logits[i], 0))
        calls += 1

    with watched_indexers(model, see):
        run(model, name, "eager")
    layers = sum(layer.self_attn.indexer is not None for layer in model.model.layers)
    assert calls == layers * len(RUNS[name][0])


def absorbed_attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: flash_mla_sparse_fwd over the latents of the layer.

    indices int32 [B, S, topk] may name keys beyond the causal mask [B, 1, S, T]; -1 is no key.
    """
    latent, k_rope = module.latents
    batch, heads, queries, _ = q.shape
    up = module.kv_b_proj.weight.unflatten(0, (heads, -1))
    w_key, w_value = up.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    q_nope, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    absorbed = torch.cat([torch.einsum("bhsn,hnc->bhsc", q_nope, w_key), q_rope], -1)
    kv = torch.cat([latent, k_rope], -1)[:, 0].flatten(0, 1)[:, None]
    visible = mask.expand(batch, 1, queries, -1)[:, 0].gather(-1, indices.long())
    offsets = torch.arange(batch, dtype=torch.int32)[:, None, None] * k.shape[2]
    rows = torch.where(visible, indices + offsets, -1)
    out, _, _ = cpattn.flash_mla_sparse_fwd(
        absorbed.transpose(1, 2).flatten(0, 1).contiguous(),
        kv,
        rows.flatten(0, 1)[:, None].contiguous(),
        scaling,
        d_v=module.kv_lora_rank,
    )
    values = torch.einsum("thc,hvc->thv", out, w_value)
    return values.unflatten(0, (batch, queries)), None


@pytest.fixture
def absorbed(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of `absorbed_attention`, whose layers keep the latents that they expand."""
    name = "cpattn_absorbed"
    AttentionInterface.register(name, absorbed_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    for layer in model.model.layers:
        attention = layer.self_attn

        def expand(latent: Tensor, k_rope: Tensor, attention: Any = attention) -> Any:
            attention.latents = latent, k_rope
            return type(attention).expand_kv(attention, latent, k_rope)

        monkeypatch.setattr(attention, "expand_kv", expand)
    return name


@pytest.mark.parametrize("name", RUNS)
def test_absorbed_attention_gives_the_logits_of_eager(model: Any, absorbed: str, name: str) -> None:
    expected = run(model, name, "eager")
    actual = run(model, name, absorbed)
    # Three layers of float32 sums in another order; without the sparsity all logits differ.
    torch.testing.assert_close(actual, expected, rtol=0, atol=100 * EPS * expected.abs().max())
