# SPDX-License-Identifier: Apache-2.0
"""Device maps of accelerate work with our attention: hooks on modules, and weights on disk."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import dispatch_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import cpattn.integrations.transformers as integration  # noqa: E402
from support.transformers.tiny_transformers import generate, make_model, make_tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOKENS = make_tokens(2, 30)
PADDED = (torch.arange(30) >= torch.tensor([0, 7])[:, None]).long()
SPLIT = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
SPLIT |= {"model.layers.0": "cpu", "model.layers.1": "disk"}

integration.register()


@pytest.fixture(scope="module")
def expected() -> Any:
    return generate(make_model("qwen3"), "cpattn", TOKENS, 6, attention_mask=PADDED)


def assert_same(model: Any, expected: Any) -> None:
    actual = generate(model, "cpattn", TOKENS, 6, attention_mask=PADDED)
    assert torch.equal(actual.sequences, expected.sequences)
    assert torch.equal(torch.stack(actual.logits), torch.stack(expected.logits))


def test_on_one_device_with_hooks(expected: Any) -> None:
    model = dispatch_model(make_model("qwen3"), {"": "cpu"}, "cpu", force_hooks=True)
    assert hasattr(model.model.layers[1], "_hf_hook")
    assert_same(model, expected)


def test_loaded_onto_cpu_and_disk(expected: Any, tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path / "model")
    placed = {"device_map": SPLIT, "offload_folder": tmp_path / "weights"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="cpattn", dtype=torch.float32, **placed
    )
    assert model.model.layers[1].self_attn.q_proj.weight.device.type == "meta"  # it comes from disk
    assert_same(model, expected)
