# SPDX-License-Identifier: Apache-2.0
"""The library `kernels` and transformers load the folder, offline and without the package."""

import sys

import build_hub_kernel
import pytest

from support.pages import run_page
from support.places import ROOT

pytest.importorskip("kernels", reason="kernels is not installed")
pytestmark = [pytest.mark.engine("kernels"), pytest.mark.slow]

ALONE = """
import sys
sys.modules["cpattn"] = None
import torch
torch.manual_seed(0)
"""
MODEL = """
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
sizes = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
ids, mask = torch.randint(1, 97, (3, 12)), torch.ones(3, 12, dtype=torch.long)
mask[0, :5] = mask[1, :2] = 0
given = dict(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
experts = dict(num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
for model, reference in (
    (LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "sdpa"),
    (GptOssForCausalLM(GptOssConfig(**sizes, **experts)).eval(), "eager"),
):
    with torch.no_grad():
        for layer in model.modules():
            if hasattr(layer, "sinks"):
                layer.sinks.normal_(std=3)
    model.set_attn_implementation(reference)
    expected = model.generate(**given)
    model._compatible_flash_implementations = None
    model.set_attn_implementation("kernels-community/flash-attn2")
    assert model.config._attn_implementation == "kernels-community/flash-attn2"
    print(type(model).__name__, torch.equal(model.generate(**given), expected))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("kernel")
    build_hub_kernel.write(build_hub_kernel.files_of_checkout(), out)
    return out


def run(children, program, folder):
    variables = {
        "HF_HUB_OFFLINE": "1",
        "LOCAL_KERNELS": f"kernels-community/flash-attn2={folder}",
        "HOME": str(folder),
    }
    done = children.run([sys.executable, "-c", ALONE + program, folder], env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_page(tmp_path, children):
    build_hub_kernel.write(build_hub_kernel.files_of_checkout(), tmp_path / "hub-kernel")
    run_page(ROOT / "docs" / "how_to" / "hub_kernel.md", tmp_path, children)


def test_tokens_of_transformers(children, folder):
    """Models are in float32; the second one has windows and sinks, which sdpa lacks."""
    assert run(children, MODEL, folder) == ["LlamaForCausalLM True", "GptOssForCausalLM True"]
