# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers that cache latents, and how the tests run them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from cpattn.integrations.transformers import absorb_mla, use_indexer
from support.tolerances import ABSORBED_UNITS, ROUNDED_ONCE, TOLERANCES
from support.tolerances import EPS as SPACINGS
from support.transformers.tiny_transformers import CACHE, make_tokens

TOPK = 8
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64}
SIZES |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64}
SIZES |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
SIZES |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "pad_token_id": 0}
SIZES |= {"bos_token_id": None, "eos_token_id": None}
SIZES |= {"initializer_range": 0.15}  # so that greedy tokens vary
ODD_HEADS = {"qk_nope_head_dim": 24, "v_head_dim": 20}
# If there were fewer heads, some queries had only negative weights, and chose among zeros.
INDEXER = {"index_topk": TOPK, "index_head_dim": 32, "index_n_heads": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
YARN |= {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
MLA_CONFIGS = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES),
    "deepseek_v3, no q_lora": lambda: transformers.DeepseekV3Config(
        **SIZES | {"q_lora_rank": None}
    ),
    "deepseek_v3, yarn": lambda: transformers.DeepseekV3Config(**SIZES, rope_parameters=YARN),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**SIZES),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**SIZES),
}
DSA_CONFIGS = {
    "axk2": lambda: transformers.AXK2Config(**SIZES, **INDEXER),
    "deepseek_v32": lambda: transformers.DeepseekV32Config(**SIZES | ODD_HEADS, **INDEXER),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
        **SIZES, **INDEXER, index_topk_pattern="FSF"
    ),
}
CONFIGS = MLA_CONFIGS | DSA_CONFIGS

LENGTH = 50
#: Lengths of the chunks, and number of padding tokens at the left of each sequence.
RUNS = {"prefill": ([LENGTH], [0]), "chunks": ([11, 19, 1, 19], [0])}
RUNS |= {"left padded": ([LENGTH], [0, 13, 47]), "left padded chunks": ([48, 1, 1], [0, 13, 47])}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval().to(dtype)


FORMS = {"heads": [], "latents": [absorb_mla], "heads, indexer": [use_indexer]}
FORMS |= {"latents, indexer": [absorb_mla, use_indexer]}
#: Each model in each of its forms.
IN_FORMS = [
    (name, form) for name in CONFIGS for form in FORMS if name in DSA_CONFIGS or "," not in form
]


@contextmanager
def form_of(model: Any, name: str, *arguments: str) -> Iterator[None]:
    with ExitStack() as stack:
        for replace in FORMS[name]:
            stack.enter_context(replace(model, *arguments))
        yield


@torch.inference_mode()
def logits(model: Any, run: str, implementation: str) -> Tensor:
    """Return the logits of all tokens that are not padding, [n, vocab]."""
    chunks, padding = RUNS[run]
    model.config._attn_implementation = implementation
    tokens = make_tokens(len(padding), LENGTH)
    mask = torch.arange(LENGTH) >= torch.tensor(padding)[:, None]
    cache = DynamicCache(config=model.config)
    parts, begin = [], 0
    for length in chunks:
        end = begin + length
        visible = mask[:, :end]
        result = model(
            tokens[:, begin:end],
            attention_mask=visible.long() if any(padding) else None,
            position_ids=(visible.cumsum(1) - 1).clamp(min=0)[:, begin:],
            **{CACHE: cache},
        )
        parts.append(result.logits)
        begin = end
    return torch.cat(parts, 1)[mask]


@contextmanager
def checked_attention(attend: Callable[..., Any], name: str = "checked") -> Iterator[list[int]]:
    """Register an attention function that compares `attend` with float64 in every layer.

    The model continues with the right result, so that roundings of a layer do not choose other keys
    and experts in the next. Yields the list of compared layers.
    """
    layers = []

    def checked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kw: Any):
        out, _ = attend(module, query, key, value, mask, **kw)
        visible = mask
        if (indices := kw.get("indices")) is not None:
            chosen = torch.zeros(len(indices), 1, *mask.shape[2:], dtype=torch.bool)
            visible = mask & chosen.scatter(-1, indices[:, None].long(), True)
        right, bound = in_float64(module, query, key, value, visible, kw["scaling"])
        assert ((out.double() - right).abs() <= bound).all()
        layers.append(module.layer_idx)
        return right.to(query.dtype), None

    AttentionInterface.register(name, checked)
    AttentionMaskInterface.register(name, sdpa_mask)
    yield layers


def in_float64(
    module: Any, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return attention [batch, queries, heads, v_head_dim], and its allowed error in bfloat16.

    key and value belong to heads, or they are the latents and the rotated keys of all heads.
    """
    eps, units = SPACINGS["bfloat16"], TOLERANCES["attention", "bfloat16"]
    query, key, value = query.double(), key.double(), value.double()
    magnitudes = value.abs()
    if key.shape[-1] != query.shape[-1]:
        weight = module.kv_b_proj.weight.double().unflatten(0, (query.shape[1], -1))
        w_key, w_value = weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        # Each element of an absorbed query is rounded by up to half a unit, which adds up to e in a
        # score, and to exp(2 e) in a weight.
        absorbed = torch.einsum("bhsn,hnc->bhsc", query[..., : w_key.shape[1]], w_key)
        e = (absorbed.square() @ key.square().mT).masked_fill(~visible, 0).amax(-1).sqrt()
        e *= ABSORBED_UNITS * eps * scaling
        # Attention rounds its result, and so does the projection.
        units = torch.expm1(2 * e).mT[..., None] / eps + units + ROUNDED_ONCE
        rope, latent = value.expand(-1, query.shape[1], -1, -1), key
        key = torch.cat([torch.einsum("bztc,hnc->bhtn", latent, w_key), rope], -1)
        value = torch.einsum("bztc,hvc->bhtv", latent, w_value)
        magnitudes = torch.einsum("bztc,hvc->bhtv", latent.abs(), w_value.abs())
    scores = (scaling * query @ key.mT).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()  # padding rows see no key
    return (weights @ value).transpose(1, 2), eps * units * (weights @ magnitudes).transpose(1, 2)
