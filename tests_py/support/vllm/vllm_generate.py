# SPDX-License-Identifier: Apache-2.0
"""A process that runs vLLM engines one after the other: ``python vllm_generate.py RUNS RESULTS``.

RUNS is a JSON file with a list of {"engine": arguments of LLM, "prompts", "sampling"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def generate(run: dict[str, Any]) -> dict[str, Any]:
    """Prompts in two turns, the second in reverse order, when all of them are cached."""
    llm = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        block_size=32,
        disable_log_stats=True,
        **run["engine"],
    )
    sampling = SamplingParams(
        temperature=0, detokenize=False, ignore_eos=True, logprobs=0, **run["sampling"]
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    results += llm.generate(prompts[::-1], sampling, use_tqdm=False)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]  # not those of experts
    return {
        "layers": [type(impl).__name__ for impl in impls],
        "is_stock": [getattr(impl, "is_stock", True) for impl in impls],
        "tokens": [list(result.outputs[0].token_ids) for result in results],
        "num_cached": [result.num_cached_tokens for result in results],
        "prompt_logprobs": [
            [entry[token].logprob for entry, token in zip(found[1:], prompt[1:], strict=True)]
            for result in results
            if (found := result.prompt_logprobs)
            for prompt in [result.prompt_token_ids]
        ],
    }


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([generate(run) for run in runs]))
