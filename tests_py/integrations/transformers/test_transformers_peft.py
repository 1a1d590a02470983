# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT around models agree with eager on our attention."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft  # noqa: E402

import cpattn.integrations.transformers as integration  # noqa: E402
from cpattn.integrations.transformers.context_parallel.layers import layer_shapes  # noqa: E402
from support.tolerances import assert_logits_close  # noqa: E402
from support.transformers.tiny_transformers import make_model, make_tokens  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    # PEFT 0.21 warns: transformers passes positions, and has renamed a property.
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LENGTH = 30
BATCH = {
    "input_ids": make_tokens(2, LENGTH),
    "attention_mask": (torch.arange(LENGTH) >= torch.tensor([0, 7])[:, None]).long(),
}
SEEN = BATCH["attention_mask"].bool()
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    "LoRA": peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
}

integration.register()


def adapted(kind: str, name: str = "llama") -> tuple[Any, Any]:
    model = make_model(name)
    torch.manual_seed(3)
    adapter = peft.get_peft_model(model, KINDS[kind]).eval()
    for parameter in adapter.parameters():
        if parameter.requires_grad and kind != "LoRA":
            torch.nn.init.normal_(parameter)
    return adapter, model


@torch.inference_mode()
def logits(model: Any) -> Any:
    return model(**BATCH).logits[:, -LENGTH:][SEEN]


@torch.inference_mode()
def tokens(model: Any) -> Any:
    return model.generate(**BATCH, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_eager(kind: str) -> None:
    adapter, model = adapted(kind)
    model.set_attn_implementation("eager")
    expected, generated = logits(adapter), tokens(adapter)
    model.set_attn_implementation("cpattn")
    assert_logits_close(logits(adapter), expected)
    assert torch.equal(tokens(adapter), generated)
    base = make_model("llama")
    base.set_attn_implementation("cpattn")
    with adapter.disable_adapter():
        assert torch.equal(logits(adapter), logits(base))
    assert (expected - logits(base)).abs().max() > 0.1  # else the adapter does nothing


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_rows_of_no_token_are_refused_over_ranks(kind: str) -> None:
    with pytest.raises(ValueError, match="layer 0 does not make each token's query and key"):
        layer_shapes(adapted(kind)[0])


def test_merged_and_loaded_adapters(tmp_path: Path) -> None:
    adapter, model = adapted("LoRA", "qwen3")
    model.set_attn_implementation("cpattn")
    expected = logits(adapter)
    adapter.save_pretrained(tmp_path)
    base = make_model("qwen3")
    base.set_attn_implementation("cpattn")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path)), expected)
    assert_logits_close(logits(adapter.merge_and_unload()), expected)


def test_latents_are_absorbed_beside_adapters_of_other_weights() -> None:
    model = make_model("deepseek_v3")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    adapter = peft.get_peft_model(model, config).eval()
    model.set_attn_implementation("cpattn")
    expected = logits(adapter)
    with integration.absorb_mla(adapter):
        assert_logits_close(logits(adapter), expected)
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj"])
    adapter = peft.get_peft_model(make_model("deepseek_v3"), config)
    with pytest.raises(ValueError, match=r"kv_b_proj must be a torch.nn.Linear"):
        integration.absorb_mla(adapter)
