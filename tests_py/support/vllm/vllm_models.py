# SPDX-License-Identifier: Apache-2.0
"""Folders with small models of random weights that vLLM loads, and the settings it needs on CPU."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 512
# This is about 1 / sqrt(hidden_size): scores and logits vary by more than one, so that the next
# token depends on all earlier ones, and greedy continuations do not fall into a loop.
_INITIALIZER_RANGE = 0.1

_DECODER = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256}
_DECODER |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_DECODER |= {"head_dim": 64, "max_position_embeddings": 2048}
_DECODER |= {"initializer_range": _INITIALIZER_RANGE, "tie_word_embeddings": False}
_DECODER |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32}
_LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "first_k_dense_replace": 2}
_LATENT |= {"moe_layer_freq": 1}  # a name from before transformers 5 that sglang reads
# sglang supports no other rotary embedding of this model on a CPU.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
_YARN |= {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_WINDOW = {"sliding_window": 48}
_GEMMA3 = {"query_pre_attn_scalar": 64, "tie_word_embeddings": True}
_GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"]}
# Each one adds to the first: ALiBi, softcap, sinks, or windows on every second layer.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "bloom": {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "n_layer": 2,
        "n_head": 4,
        "initializer_range": _INITIALIZER_RANGE,
        "tie_word_embeddings": True,  # the model has no other form
    },
    "qwen3": _DECODER,
    "gemma2": {
        **_DECODER,
        "sliding_window": 48,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 5.0,
        "hidden_act": "gelu_pytorch_tanh",  # a name from before transformers 5 that sglang reads
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,  # the model has no other form
    },
    "gemma3_text": {**_DECODER, **_WINDOW, **_GEMMA3},
    "deepseek_v3": {  # it has no experts
        **{name: value for name, value in _DECODER.items() if name != "head_dim"},
        **_LATENT,
        "rope_parameters": _YARN,
    },
    "gpt_oss": {**_DECODER, "sliding_window": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
}

# Settings that a new process may make before it imports vLLM.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # oneDNN uses AMX if the machine shows it, and dies if its tiles are off.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
}


def write_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Write config.json with `changes` and random weights, without a tokenizer."""
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(6)  # near the largest scores, so that sinks count
        elif kind.startswith("gemma") and "post_" in name:
            parameter.data.fill_(8)  # else a token's own embedding, tied to the output, repeats it
        elif name.endswith("word_embeddings_layernorm.weight"):  # a layer of Bloom
            parameter.data.fill_(1 / 32)  # the reason is the same
    model.save_pretrained(folder)
    return folder


def random_prompts(lengths: list[int], *, shared: int) -> list[list[int]]:
    """Return token ids; the first `shared` are equal in all prompts, and part of their lengths."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    prefix = tokens(shared)
    return [prefix + tokens(length - shared) for length in lengths]
