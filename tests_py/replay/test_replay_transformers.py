# SPDX-License-Identifier: Apache-2.0
"""Models of the replay agree with those of transformers, written by others, on equal weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from cpattn_lab.replay.dense.check import Checker, dense_attention
from cpattn_lab.replay.dense.model import DenseConfig
from cpattn_lab.replay.dsa.check import RestrictedAttention, SparseChecker
from cpattn_lab.replay.dsa.model import EPS, DsaConfig
from cpattn_lab.replay.model import Decoder, DecoderConfig
from support.replay.replay_models import SMALL_DSA

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DENSE = DenseConfig(num_layers=3, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32,
                    intermediate_size=160, vocab_size=128)  # fmt: skip
SPARSE = replace(SMALL_DSA, topk=12)
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LENGTH = 70
FLOAT32_EPS = torch.finfo(torch.float32).eps  # F.rms_norm uses it by default


def common(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attn_implementation": "eager",
    }


def shared_weights(ours: Decoder) -> dict[str, Tensor]:
    weights = {"embed_tokens.weight": ours.embedding.weight, "norm.weight": ours.norm.weight}
    for index, layer in ours.layers.items():
        gate, up = layer.gate_up_proj.weight.chunk(2)
        weights |= {
            f"layers.{index}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": layer.input_norm.weight,
                "post_attention_layernorm": layer.post_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.down_proj.weight,
                "self_attn.o_proj": layer.attention.o_proj.weight,
            }.items()
        }
    return weights


def qwen3(ours: Decoder, config: DenseConfig) -> Any:
    """Make a Llama with normalised queries and keys; the dense model is one, too."""
    heads = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    theirs = transformers.Qwen3Model(transformers.Qwen3Config(**common(config), **heads)).eval()
    weights = shared_weights(ours)
    for index, layer in ours.layers.items():
        attention, name = layer.attention, f"layers.{index}.self_attn"
        k, v = attention.kv_proj.weight.chunk(2)
        weights |= {
            f"{name}.q_proj.weight": attention.q_proj.weight,
            f"{name}.k_proj.weight": k,
            f"{name}.v_proj.weight": v,
            f"{name}.q_norm.weight": torch.full((config.head_dim,), config.query_gain),
            f"{name}.k_norm.weight": torch.ones(config.head_dim),
        }
    theirs.load_state_dict(weights)
    for layer in theirs.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.variance_epsilon = FLOAT32_EPS
    return theirs


def deepseek_v32(ours: Decoder, config: DsaConfig) -> Any:
    """Make a model whose MLP is dense, and whose projection of queries has their gain."""
    theirs = transformers.DeepseekV32Model(
        transformers.DeepseekV32Config(
            **common(config),
            num_key_value_heads=config.num_heads,
            first_k_dense_replace=config.num_layers,
            **{name: getattr(config, name) for name in LATENT},
            index_n_heads=config.index_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.topk,
        )
    ).eval()
    weights = shared_weights(ours)
    for index, layer in ours.layers.items():
        attention, name = layer.attention, f"layers.{index}.self_attn"
        q_a, kv_a = attention.qkv_a_proj.weight.tensor_split([config.q_lora_rank])
        weights |= {
            f"{name}.{key}": weight
            for key, weight in {
                "q_a_proj.weight": q_a,
                "kv_a_proj_with_mqa.weight": kv_a,
                "q_a_layernorm.weight": attention.q_a_norm.weight,
                "kv_a_layernorm.weight": attention.kv_a_norm.weight,
                "q_b_proj.weight": config.query_gain * attention.q_b_proj.weight,
                "kv_b_proj.weight": attention.kv_b_proj.weight,
                "indexer.wq_b.weight": attention.index_q_proj.weight,
                "indexer.wk.weight": attention.index_k_proj.weight,
                "indexer.k_norm.weight": attention.index_k_norm.weight,
                "indexer.k_norm.bias": attention.index_k_norm.bias,
                "indexer.weights_proj.weight": attention.index_weights_proj.weight,
            }.items()
        }
    theirs.load_state_dict(weights)
    return theirs


def tokens_of(config: DecoderConfig) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocab_size, (LENGTH,), generator=generator)


def randomised(config: DecoderConfig) -> Decoder:
    """Make a model with random weights and biases of norms, so that leaving one out is seen."""
    ours = Decoder(config)
    generator = torch.Generator().manual_seed(7)
    for weight in ours.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    return ours


@torch.inference_mode()
def test_the_dense_model_is_a_llama_with_normalised_queries_and_keys():
    ours, tokens = randomised(DENSE), tokens_of(DENSE)
    positions = torch.arange(LENGTH)
    states = ours(tokens, positions, lambda _, q, k, v: dense_attention(q, k, v, positions))
    expected = qwen3(ours, DENSE)(tokens[None]).last_hidden_state[0]
    assert (states - expected).abs().max() <= Checker.tolerance_of(DENSE)


def choice_of(theirs: Any, tokens: Tensor) -> tuple[Tensor, np.ndarray]:
    """Return final states, and the keys that the indexer chose, or -1 for keys not seen."""
    chosen: list[Tensor] = []
    indexer = theirs.layers[0].self_attn.indexer
    indexer.register_forward_hook(lambda module, inputs, output: chosen.append(output[0]))
    states = theirs(tokens[None]).last_hidden_state[0]
    (keys,) = (x.numpy() for x in chosen)
    return states, np.where(keys <= np.arange(len(keys))[:, None], keys, -1)


@torch.inference_mode()
def test_the_sparse_model_is_a_layer_of_deepseek_v32():
    """Their model chooses the keys that are the best ones by ours."""
    ours, tokens = randomised(SPARSE), tokens_of(SPARSE)
    expected, keys = choice_of(deepseek_v32(ours, SPARSE), tokens)
    operators = RestrictedAttention(SPARSE, np.arange(LENGTH), keys)
    states = ours(tokens, torch.arange(LENGTH), operators)
    assert not operators.wrong_rows.any()
    assert operators.num_keys == np.minimum(np.arange(LENGTH) + 1, SPARSE.topk).sum()
    assert (states - expected).abs().max() <= SparseChecker.tolerance_of(SPARSE)
    for name in ("index_q_proj", "index_k_proj", "index_weights_proj"):  # a change is seen
        weight = getattr(ours.layers["0"].attention, name).weight
        weight.neg_()
        operators = RestrictedAttention(SPARSE, np.arange(LENGTH), keys)
        ours(tokens, torch.arange(LENGTH), operators)
        assert operators.wrong_rows[SPARSE.topk :].sum() > LENGTH // 2, name
        weight.neg_()
