# SPDX-License-Identifier: Apache-2.0
"""Programs of ranks that share a small model, and the tokens that one process generates."""

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedTokenizerFast

from cpattn.integrations.transformers import ContextParallelModel
from cpattn.integrations.transformers.context_parallel import model as model_over_ranks
from cpattn.integrations.transformers.context_parallel import pools
from support.distributed.distributed_worker import error_of
from support.transformers.tiny_transformers import VOCABULARY, generate, make_model, make_tokens

NEW_TOKENS = 12
PAGE, PAGES = 8, 96
PREFIX = make_tokens(20, seed=1).tolist()  # two pages and a half
PROMPTS = [
    *(PREFIX + make_tokens(n, seed=n).tolist() for n in (4, 13, 1, 30)),  # three whole pages first
    *(make_tokens(n, seed=n).tolist() for n in (2, 1)),
]
PROMPTS.append(PROMPTS[1])
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
DRAWN = {"max_new_tokens": 6, "do_sample": True, "temperature": 3.0, "top_k": 20}
PENALTIES = {
    "repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 0.5
}  # fmt: skip
POSITIONS = len(PROMPTS[3]) + NEW_TOKENS


def engine_of(model: Any, **options: Any) -> ContextParallelModel:
    return ContextParallelModel(model, **{"page_size": PAGE, "num_pages": PAGES} | options)


def alone(model: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    given = {"new_tokens": NEW_TOKENS} | options
    result = generate(model, "eager", torch.tensor([prompt]), **given)
    return result.sequences[0, len(prompt) :].tolist()


def words() -> Any:
    """Return a tokenizer whose token 7 is the text "w7."."""
    numbered = {f"w{i}.": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered, unk_token="w0."))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # of which stop strings ask
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Streamer:
    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.got.append([])


def run_core(rank: int) -> dict[str, Any]:
    """Make the calls of a server and of a user, over one rank or two."""
    model, found = make_model("llama"), {}
    engine = engine_of(model, token_budget=24)
    found["tokens"], found["logprobs"] = engine.generate(PROMPTS, **GREEDY, return_logprobs=True)
    hits = engine.hit_tokens
    found["again"] = engine.generate(PROMPTS, **GREEDY)
    found["hits"] = hits, engine.hit_tokens - hits
    streamer = Streamer() if rank == 0 else None
    longer = PROMPTS[0] + found["tokens"][0]
    hits = engine.hit_tokens
    found["longer"] = engine.generate([longer], **GREEDY, streamer=streamer)
    found["hits of what was generated"] = engine.hit_tokens - hits
    found["streamed"] = streamer and streamer.got
    found["drawn"] = [engine.generate(PROMPTS, seed=seed, **DRAWN) for seed in (3, 3, 4)]
    found["penalised"] = engine.generate(PROMPTS[:2], **GREEDY, **PENALTIES)
    model.config.max_position_embeddings = POSITIONS
    found["of no length"] = engine.generate(
        PROMPTS[::3], logits_processor=None, stopping_criteria=None
    )
    stop = GenerationConfig(**GREEDY, eos_token_id=found["tokens"][1][3])
    found["stopped"] = engine.generate(PROMPTS[:2], stop)
    by_text = GREEDY | {"stop_strings": [f"w{stop.eos_token_id}."], "tokenizer": words()}
    found["stopped by text"] = engine.generate(PROMPTS[:2], **by_text)
    requests, logits = engine.prefill(PROMPTS[:3], max_new_tokens=3)
    found["logits"] = [logits.numpy()]
    last = rank == dist.get_world_size() - 1
    found["real"] = error_of(lambda: engine.decode({requests[0]: 3.7 if last else 3}))[0]
    if rank or not last:
        found["other"] = error_of(lambda: engine.decode({requests[0]: rank}))[0]
    for _ in range(3):
        chosen = logits.argmax(-1).tolist()
        logits = engine.decode(dict(zip(requests, chosen, strict=True)))
        found["logits"].append(logits.numpy())
    found["full"] = error_of(lambda: engine.decode({requests[0]: 1}))[0]
    engine.free(requests)
    found["none"] = [list(x.shape) for x in (engine.prefill([]).logits, engine.decode({}))]
    found["mixed"] = mixed(engine)
    found["free"] = engine.cache.num_free_pages + engine.cache.num_idle_pages
    found["errors"] = {
        "prompts": error_of(lambda: engine.generate([[1, 2 + rank]], **GREEDY))[0],
        "long": error_of(lambda: engine.generate([[1] * 800], max_new_tokens=9))[0],
        "beams": error_of(lambda: engine.generate([[1]], num_beams=2))[0],
        "healing": error_of(lambda: engine.generate([[1]], token_healing=True))[0],
        "vocabulary": error_of(lambda: engine.generate([[64]]))[0],
        "empty": error_of(lambda: engine.generate([[]]))[0],
        "prefill": error_of(lambda: engine.prefill([[1] * 400, [2] * 400]))[0],
        "stripes": error_of(lambda: prefill_between(model))[0],
    }
    with patch.object(pools, "Pools", fail if rank else pools.Pools):
        found["errors"]["pools"] = error_of(lambda: engine_of(model))[0]
    other = make_model("llama")
    if rank:
        with torch.no_grad():
            other.model.norm.weight[0] += 1
    found["errors"]["weights"] = error_of(lambda: engine_of(other))[0]
    found["errors"]["config"] = error_of(
        lambda: engine_of(make_model("qwen3" if rank else "llama"))
    )[0]
    with patch.object(model_over_ranks, "version", lambda name: f"5.{rank}"):
        found["errors"]["release"] = error_of(lambda: engine_of(model))[0]
    found["errors"]["arguments"] = error_of(lambda: engine_of(model, num_pages=64 + rank))[0]
    found["after"] = engine.generate(PROMPTS[:1], **GREEDY)
    return found


def prefill_between(model: Any) -> Any:
    """Prefill a prompt of two pages for which no page of one of the stripes is free."""
    engine = engine_of(model, num_pages=4, placement="page_interleave")
    requests, _ = engine.prefill([[1], [2], [3], [4]])
    engine.free(requests[::2])
    return engine.prefill([[5] * 2 * PAGE])


def fail(*arguments: Any, **options: Any) -> Any:
    raise MemoryError("no room for this token")


def mixed(engine: ContextParallelModel) -> dict[str, Any]:
    tokens: dict[int, list[int]] = {}

    def step() -> bool:
        """Take a step; return whether there were tokens."""
        found = engine.step()
        for new in found:
            tokens.setdefault(new.request, []).append(new.token)
        return bool(found)

    first = engine.submit(PROMPTS[0], **GREEDY)
    while len(tokens.get(first, ())) < 3:
        step()
    left = engine.submit(make_tokens(60, seed=9).tolist(), **GREEDY)
    later = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[2:4]]
    step()
    progress = engine.progress()[left]
    engine.free([left])  # its prompt is not finished
    while step():
        pass
    kept = [tokens[number] for number in (first, *later)]
    return {"kept": kept, "left": tokens.get(left, []), "progress": progress}


def run_model(rank: int, name: str, placements: Sequence[str]) -> list[Any]:
    """Return first tokens for each placement.

    In a batch, in chunks, from the pools in a batch and alone, and alone with empty pools.
    """
    model, found = make_model(name), []
    few = GREEDY | {"max_new_tokens": NEW_TOKENS // 2}
    for placement in placements:
        found.append(engine_of(model, placement=placement).generate(PROMPTS, **few))
        engine = engine_of(model, placement=placement, token_budget=24)
        found += [engine.generate(PROMPTS, **few) for _ in range(2)]
        found.append([engine.generate([prompt], **few)[0] for prompt in PROMPTS[:2]])
        found.append(engine_of(model, placement=placement).generate(PROMPTS[3:4], **few))
    return found


def run_exchanges(rank: int, exchanges: Sequence[str], strategies: Sequence[str]) -> list[Any]:
    """Return tokens over sharded pages, for each exchange and strategy, and for weighted ranks."""
    model, found = make_model("llama"), []
    for exchange, strategy in product(exchanges, strategies):
        options = {"placement": "page_interleave", "exchange": exchange, "strategy": strategy}
        found.append(engine_of(model, **options).generate(PROMPTS, **GREEDY))
    weighted = engine_of(model, placement="page_interleave", weights=[3, 1, 2, 1])
    return [*found, weighted.generate(PROMPTS, **GREEDY)]
