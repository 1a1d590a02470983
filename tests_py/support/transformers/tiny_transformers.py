# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers whose outputs vary, one for each kind of attention."""

from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor

#: Name of a model's cache: `past_key_values` before transformers 5.24.
CACHE = "cache"
if CACHE not in signature(transformers.LlamaForCausalLM.forward).parameters:
    CACHE = "past_key_values"
VOCABULARY = 64
WINDOW = 9
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": None}
SIZES |= {"eos_token_id": None}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Transformers expands these to keys of 24 + 16 and values of 20.
LATENT = {"num_key_value_heads": 4, "head_dim": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 20, "kv_lora_rank": 32, "q_lora_rank": None, "first_k_dense_replace": 2}
# Its first layer is dense. With fewer index heads, some queries would choose among zeros.
INDEXED = {"q_lora_rank": 48, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}
INDEXED |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
INDEXED |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
SOFTCAPPED = {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
SOFTCAPPED["tie_word_embeddings"] = False
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 16
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama of odd heads": lambda: transformers.LlamaConfig(**SIZES | {"head_dim": 20}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **SLIDING, use_sliding_window=True),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **SLIDING, **SOFTCAPPED),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **SLIDING, **EXPERTS),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES | LATENT),
}
#: The same for keys that an indexer selects.
INDEXED_CONFIGS = {
    "deepseek_v32": lambda: transformers.DeepseekV32Config(**SIZES | LATENT | INDEXED),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
        **SIZES | LATENT | INDEXED, index_topk_pattern="FS"
    ),
}
#: Further models that run over ranks, in these sizes.
MORE_CONFIGS = {
    "llama of scaled positions": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **SLIDING, query_pre_attn_scalar=16),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, **EXPERTS, sliding_window=WINDOW),
    "olmo": lambda: transformers.OlmoConfig(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=2.0),
    "glm4": lambda: transformers.Glm4Config(**SIZES),
}


def make_model(name: str) -> Any:
    torch.manual_seed(1)
    config = (CONFIGS | INDEXED_CONFIGS | MORE_CONFIGS)[name]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter, value in model.named_parameters():
        if parameter.endswith("sinks"):
            torch.nn.init.normal_(value)
    return model


HIDDEN = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
COUNTS = ("encoder_layers", "decoder_layers"), ("encoder_ffn_dim", "decoder_ffn_dim")
HEADS = ("encoder_attention_heads", "decoder_attention_heads")
BART = dict.fromkeys(COUNTS[0], 2) | dict.fromkeys(COUNTS[1], 96) | dict.fromkeys(HEADS, 4)
BART |= {"d_model": 64, "vocab_size": 64, "max_position_embeddings": 30, "init_std": 0.15}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
ENCODERS = {
    "bert": lambda: transformers.BertConfig(
        **HIDDEN, num_attention_heads=4, initializer_range=0.15
    ),
    "bart": lambda: transformers.BartConfig(**BART),
    "t5": lambda: transformers.T5Config(**T5),
    "mt5": lambda: transformers.MT5Config(**T5),
    "umt5": lambda: transformers.UMT5Config(**T5),
}


def make_encoder(name: str, kind: Any = transformers.AutoModel) -> Any:
    torch.manual_seed(3)
    model = kind.from_config(ENCODERS[name]()).eval()
    for parameter, value in model.named_parameters():
        if "relative_attention_bias" in parameter:  # its default hardly matters
            torch.nn.init.normal_(value)
    return model


def make_tokens(*shape: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def generate(
    model: Any, implementation: str, tokens: Tensor, new_tokens: int, **options: Any
) -> Any:
    """Generate greedy tokens of each row; return them and their logits."""
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        given = {"max_new_tokens": new_tokens, "do_sample": False, "output_logits": True}
        given |= {"return_dict_in_generate": True}
        return model.generate(tokens, **given, **options)
