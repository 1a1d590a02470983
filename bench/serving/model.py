# SPDX-License-Identifier: Apache-2.0
"""A model that two cores can serve: random weights under the configuration of a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

VOCABULARY = 8192
Sizes = dict[str, Any]
# Per token of context attention costs eight times as much of the whole as in Llama 3 8B: with
# prompts of an eighth of the length its share is the same.
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
NUM_HEADS, NUM_KV_HEADS = 16, 4


def write(folder: Path, *, quick: bool, max_tokens: int, seed: int = 0) -> Path:
    """Write config.json and bfloat16 weights; no tokenizer, as prompts are token ids."""
    shape = QUICK if quick else FULL
    config = transformers.LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=max_tokens,
        initializer_range=shape["hidden_size"] ** -0.5,  # activations neither vanish nor explode
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def write_qwen3(folder: Path, *, quick: bool, max_tokens: int, seed: int = 0) -> Path:
    """Of Qwen3-0.6B's width, of fewer layers and words; with a tokenizer of one word a token."""
    shape = QUICK if quick else QWEN3
    config = transformers.Qwen3Config(
        **shape,
        vocab_size=VOCABULARY,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=max_tokens,
        initializer_range=shape["hidden_size"] ** -0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_deepseek(folder: Path, *, quick: bool, max_tokens: int, seed: int = 0) -> Path:
    """Latents and heads as DeepSeek V2 Lite has them, under fewer layers, without experts."""
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=QUICK["hidden_size"] if quick else 1024,
        intermediate_size=QUICK["intermediate_size"] if quick else 3072,
        num_hidden_layers=2 if quick else 6,
        first_k_dense_replace=6,  # of more layers than there are: none has experts
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=max_tokens,
        initializer_range=(QUICK["hidden_size"] if quick else 1024) ** -0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
