# SPDX-License-Identifier: Apache-2.0
"""A model that two cores can serve: random weights under the configuration of a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

VOCABULARY = 8192
Sizes = dict[str, Any]
# Attention per token of context has eight times the share of Llama 3 8B's: with prompts of an
# eighth of the length its share is the same.
FULL: Sizes = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "head_dim": 128,
}
QUICK: Sizes = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
}
# Of Qwen3-0.6B, whose 28 layers are 6 here, and whose 151,936 words are few.
QWEN3: Sizes = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "head_dim": 128,
}
#: ModernBERT's windows of 64 tokens on each side leave out every third layer.
ENCODERS: dict[str, Sizes] = {
    "BERT": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "ModernBERT": {"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12},
}
for of_kind in ENCODERS.values():
    of_kind["num_hidden_layers"] = 12
QUICK_ENCODERS: Sizes = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}
NUM_HEADS, NUM_KV_HEADS = 16, 4


def write(folder: Path, *, quick: bool, max_tokens: int, seed: int = 0) -> Path:
    """Write config.json and bfloat16 weights; no tokenizer, because prompts are token ids."""
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS}
    return _write(folder, "llama", (QUICK if quick else FULL) | heads, max_tokens, seed)


def write_qwen3(folder: Path, *, quick: bool, max_tokens: int, seed: int = 0) -> Path:
    """Write a model of Qwen3-0.6B's width with fewer layers and words, and a word tokenizer."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    _write(folder, "qwen3", (QUICK if quick else QWEN3) | heads, max_tokens, seed)
    return _write_tokenizer(folder)


def write_encoder(
    folder: Path, kind: str, task: str, *, quick: bool, max_tokens: int, seed: int = 0
) -> Path:
    """Write a model of BERT's or ModernBERT's width in 12 layers, without a head or with one."""
    sizes = QUICK_ENCODERS if quick else ENCODERS[kind]
    tokens = dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0)
    head = AutoModel if task == "embed" else AutoModelForSequenceClassification
    _write(folder, kind.lower(), sizes | tokens | {"num_labels": 1}, max_tokens, seed, head)
    return _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> Path:
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_deepseek(folder: Path, *, quick: bool, max_tokens: int, seed: int = 0) -> Path:
    """Write a model with DeepSeek V2 Lite's latents and heads, fewer layers and no experts."""
    latents = {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": QWEN3["num_hidden_layers"],  # none has experts
    }
    shape = {name: size for name, size in (QUICK if quick else QWEN3).items() if name != "head_dim"}
    return _write(folder, "deepseek_v3", shape | latents, max_tokens, seed)


def _write(
    folder: Path,
    kind: str,
    sizes: Sizes,
    max_tokens: int,
    seed: int,
    head: Any = AutoModelForCausalLM,
) -> Path:
    config = transformers.AutoConfig.for_model(
        kind,
        **sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=max_tokens,
        initializer_range=sizes["hidden_size"] ** -0.5,  # activations neither vanish nor explode
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = head.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
