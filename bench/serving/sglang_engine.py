# SPDX-License-Identifier: Apache-2.0
"""sglang's offline engine in a child process, on a CPU, with torch_native or with cpattn.

    python -m bench.serving.sglang_engine BACKEND MODEL PAGE_SIZE MAX_TOKENS

The engine computes in its own process, which runs the top of this module again. Times are those of
a program that calls the engine: for both backends they include scheduling and the messages between
processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from bench.harness import worker
from bench.harness.figures import Row
from bench.serving.sglang_process import install
from bench.serving.steps import prompts_of, seconds

TOP = 5  # logarithms of probabilities, in a check

if __name__ in {"__main__", "__mp_main__"}:  # the latter in the process that computes
    install(sys.argv[1])


class Engine:
    """Commands are its public methods."""

    def __init__(self, backend: str, model: str, page_size: int, max_tokens: int) -> None:
        from sglang.srt.entrypoints.engine import (  # type: ignore[import-not-found]
            Engine as Offline,
        )

        self.version = version("sglang")
        self._engine = Offline(
            model_path=model,
            device="cpu",
            dtype="bfloat16",
            attention_backend=backend,
            page_size=page_size,
            max_total_tokens=max_tokens,
            chunked_prefill_size=max_tokens,  # a prompt is one step
            mem_fraction_static=0.5,  # else such steps leave nothing for the pool, in theory
            skip_tokenizer_init=True,
            sleep_on_idle=True,  # else the one that waits for its turn takes a core
            random_seed=0,
            log_level="error",
        )
        self._vocab_size: int = self._engine.tokenizer_manager.model_config.vocab_size

    def greedy(self, batch: int, length: int, num_tokens: int) -> Row:
        """Tokens after each prompt, and the best ones with their log probabilities at each step."""
        self._engine.flush_cache()
        outputs = self._generate(
            prompts_of(batch, length, self._vocab_size),
            num_tokens,
            return_logprob=True,
            top_logprobs_num=TOP,
        )
        return {"answers": list(_answers(outputs))}

    def prefill(self, batch: int, length: int) -> Row:
        """Seconds from prompts that are not in the cache to the first token of each."""
        prompts = prompts_of(batch, length, self._vocab_size)
        self._engine.flush_cache()
        with seconds() as taken:
            self._generate(prompts, 1)
        return {"seconds": taken[0]}

    def decode(self, batch: int, length: int, steps: int) -> Row:
        """Seconds of a step that decodes one token for each sequence of a batch behind a context.

        The result is the difference of two calls for cached prompts, so that it excludes their last
        page, which is computed again.
        """
        prompts = prompts_of(batch, length, self._vocab_size)
        self._engine.flush_cache()
        self._generate(prompts, 1)
        with seconds() as short:
            self._generate(prompts, 1)
        with seconds() as long:
            self._generate(prompts, 1 + steps)
        return {"seconds": (long[0] - short[0]) / steps}

    def _generate(self, prompts: Sequence[list[int]], num_tokens: int, **options: Any) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        return self._engine.generate(input_ids=prompts, sampling_params=sampling, **options)


def _answers(outputs: Sequence[Any]) -> Iterator[Row]:
    for output in outputs:
        steps = output["meta_info"]["output_top_logprobs"]
        yield {
            "tokens": output["output_ids"],
            "best": [{token: logprob for logprob, token, _ in step} for step in steps],
        }


def main() -> None:
    backend, model, page_size, max_tokens = sys.argv[1:]
    worker.end_with_parent()
    answer = worker.answers_only()
    worker.serve(Engine(backend, model, int(page_size), int(max_tokens)), answer)


if __name__ == "__main__":
    main()
