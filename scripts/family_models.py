# SPDX-License-Identifier: Apache-2.0
"""Small random models of every type of text model that transformers has, and what they compute."""

import contextlib
import inspect
import io
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cpattn.integrations.transformers import ContextParallelModel
from support.transformers.tiny_transformers import make_tokens

T = TypeVar("T")
VOCABULARY = 64
NEW_TOKENS = 6
SECONDS = 60
#: What is set of the sizes that a configuration has; all other numbers stay as they are.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embedding_size": 64, "dim": 64,
    "intermediate_size": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "attention_head_dim": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16,
    "kv_lora_rank": 32, "q_lora_rank": 32, "rotary_dim": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "max_position_embeddings": 256, "n_positions": 256,
    "max_sequence_length": 256, "max_seq_len": 256, "sliding_window": 9, "attention_window": 9,
    "index_topk": 8, "index_n_heads": 4, "index_head_dim": 32, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0, "rope_dim": 16,
}  # fmt: skip
#: What those leave out, or contradict.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "doge": {"keep_window_size": 9},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    if hasattr(default, "text_config"):
        kind = type(default.get_text_config())
        default = kind()
    taken = set(inspect.signature(kind.__init__).parameters) | set(vars(default))
    computed = {name for name in taken if isinstance(getattr(kind, name, None), property)}
    renamed = set(getattr(kind, "attribute_map", {}))
    sizes = {name: SIZES[name] for name in taken & set(SIZES) - computed - renamed}
    for name in {"layer_types", "mlp_layer_types", "layers_block_type"} & taken - computed:
        if given := getattr(default, name, None):
            # Layers of each kind.
            kinds = list(dict.fromkeys(given))
            sizes["num_hidden_layers"] = max(2, len(kinds))
            sizes[name] = (kinds * 2)[: sizes["num_hidden_layers"]]
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    return kind(**sizes | EXCEPTIONS.get(model_type, {}))


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Family:
    def __init__(self, model_type: str) -> None:
        torch.manual_seed(1)
        self.model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval().float()
        for name, parameter in self.model.named_parameters():
            if name.endswith(("sinks", ".A")):  # which begin as numbers that are all the same
                torch.nn.init.normal_(parameter)
        self.tokens = make_tokens(2, 23)
        self.prompts = [self.tokens[0, 7:].tolist(), self.tokens[1].tolist()]
        greedy = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        self.generation = GenerationConfig(max_new_tokens=NEW_TOKENS, **greedy)

    def compute(self, part: str, implementation: str) -> torch.Tensor:
        self.model.set_attn_implementation(implementation)
        with torch.inference_mode():
            return getattr(self, "_" + part.replace(" ", "_"))()

    def _prompt(self) -> torch.Tensor:
        return self.model(self.tokens).logits

    def _mask(self) -> torch.Tensor:
        mask = torch.ones_like(self.tokens)
        mask[0, :7] = 0
        return mask

    def _padding(self) -> torch.Tensor:
        logits = self.model(self.tokens, attention_mask=self._mask()).logits
        return torch.cat([logits[0, 7:], logits[1]])

    def _generate(self, **options: Any) -> torch.Tensor:
        options |= {"output_logits": True, "return_dict_in_generate": True}
        options |= {"attention_mask": self._mask(), "generation_config": self.generation}
        return torch.stack(self.model.generate(self.tokens, **options).logits)

    def _static_cache(self) -> torch.Tensor:
        return self._generate(cache_implementation="static", disable_compile=True)

    def one_by_one(self) -> torch.Tensor:
        """The tokens that eager attention generates from each prompt alone."""
        self.model.set_attn_implementation("eager")
        with torch.inference_mode():
            rows = [(torch.tensor([prompt]), len(prompt)) for prompt in self.prompts]
            options = {"generation_config": self.generation}
            made = [self.model.generate(ids, **options)[0, n:] for ids, n in rows]
        return torch.stack(made)

    def batched(self) -> torch.Tensor:
        """Generate the tokens by continuous batching, with the model's implementation."""
        sizes = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 24}
        config = ContinuousBatchingConfig(auto_switch_to_flash=False, **sizes)
        options = {"generation_config": self.generation, "continuous_batching_config": config}
        results = self.model.generate_batch(self.prompts, **options)
        made = [results[f"req_{i}"].generated_tokens for i in range(len(self.prompts))]
        return torch.tensor(made)


def quietly(compute: Callable[[], T]) -> T:
    with time_limit(SECONDS), contextlib.redirect_stderr(io.StringIO()):
        return compute()


def over_ranks(rank: int, model_type: str) -> torch.Tensor | str:
    """Generate the tokens over sharded pages, in chunks; return them, or why that is refused."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    family = Family(model_type)
    sizes: dict[str, Any] = {"page_size": 8, "num_pages": 32, "token_budget": 24}
    try:
        engine = ContextParallelModel(family.model, placement="page_interleave", **sizes)
    except ValueError as error:
        return str(error).partition(f"got {type(family.model).__name__}: ")[2] or str(error)
    return torch.tensor(engine.generate(family.prompts, family.generation))
