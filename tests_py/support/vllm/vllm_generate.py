# SPDX-License-Identifier: Apache-2.0
"""Process that runs vLLM engines one after the other: ``python vllm_generate.py RUNS RESULTS``.

RUNS is a JSON file with a list of {"engine": arguments of LLM, "prompts", "sampling", "codes"}.
"codes" is for FP8 caches: with "rounded" vLLM's own kernels round to the nearest code, like cpattn,
instead of cutting off; with "left" cpattn leaves such layers to vLLM.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from cpattn.integrations.vllm import cache
from support.sglang.sglang_models import leave_nothing


def rounded_update(layer_impl: Any, layer: Any, key: Any, value: Any, *rest: Any) -> None:
    """Call do_kv_cache_update with rows rounded to codes, times the scale of these models, 1.

    Cutting off does not change such numbers.
    """
    code = cache.CODES.get(layer_impl.kv_cache_dtype)
    if code is not None:
        assert layer._k_scale_float == layer._v_scale_float == 1
        key, value = (x.to(code).to(x.dtype) for x in (key, value))
    update(layer_impl, layer, key, value, *rest)


update = CPUAttentionBackendImpl.do_kv_cache_update


def changed(codes: str | None) -> Any:
    if codes == "rounded":
        return mock.patch.object(CPUAttentionBackendImpl, "do_kv_cache_update", rounded_update)
    return mock.patch.dict(cache.CODES, clear=codes == "left")


def generate(run: dict[str, Any]) -> dict[str, Any]:
    """Generate in two turns, the second in reverse order, when all prompts are cached."""
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024}
    options |= {"max_num_batched_tokens": 128, "max_num_seqs": 4, "block_size": 32}
    options |= {"disable_log_stats": True}
    llm = LLM(**options, **run["engine"])
    sampling = SamplingParams(
        temperature=0, detokenize=False, ignore_eos=True, logprobs=0, **run["sampling"]
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    results += llm.generate(prompts[::-1], sampling, use_tqdm=False)
    leave_nothing(os.getpid())  # ranks share memory, and are killed
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]  # experts have none
    scored = [(x.prompt_logprobs, x.prompt_token_ids) for x in results if x.prompt_logprobs]
    return {
        "layers": [type(impl).__name__ for impl in impls],
        "is_stock": [getattr(impl, "is_stock", True) for impl in impls],
        "tokens": [list(result.outputs[0].token_ids) for result in results],
        "num_cached": [result.num_cached_tokens for result in results],
        "prompt_logprobs": [
            [entry[token].logprob for entry, token in zip(found[1:], prompt[1:], strict=True)]
            for found, prompt in scored
        ],
    }


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for run in runs:
        with changed(run.get("codes")):
            results.append(generate(run))
    Path(sys.argv[2]).write_text(json.dumps(results))
