# SPDX-License-Identifier: Apache-2.0
"""Attention for an engine of one's own: a toy server that prefills, decodes and reuses pages.

    python examples/own_engine.py

Needs NumPy alone. Two attention layers with random weights answer four requests, at most three at
a time. Pages come from a free list; a step mixes the whole prompt of a new request with one token
of each running one. `plan_attention` divides the step once, `run_attention` runs the plan in each
layer. At the end every token is computed again, without a cache, by the float64 oracle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

import cpattn

PAGE_SIZE, NUM_PAGES, LAYERS = 16, 16, 2
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 32, 100
WIDTH = NUM_HEADS * HEAD_DIM
HEADS = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
POOL = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
rng = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) / np.float32(WIDTH**0.5)


EMBEDDING, TO_TOKENS = random(VOCABULARY, WIDTH) * 8, random(WIDTH, VOCABULARY)
TO_Q, TO_OUT = random(LAYERS, WIDTH, WIDTH) * 4, random(LAYERS, WIDTH, WIDTH) * 4
TO_K, TO_V = (random(LAYERS, WIDTH, NUM_KV_HEADS * HEAD_DIM) * 4 for _ in range(2))


@dataclass
class Request:
    tokens: list[int]  # the prompt, then what was generated
    num_prompt: int
    max_new: int
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def slots(self) -> list[int]:
        """Rows of the pool for the tokens that are not in it yet."""
        places = range(self.num_cached, len(self.tokens))
        return [self.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in places]


def model(tokens: list[int], attend) -> np.ndarray:
    """Logits of all tokens; `attend(layer, q, k, v)` is all that knows of sequences and caches."""
    x = EMBEDDING[tokens]
    for layer in range(LAYERS):
        weights = TO_Q[layer], TO_K[layer], TO_V[layer]
        q, k, v = ((x @ weight).reshape(len(x), -1, HEAD_DIM) for weight in weights)
        x = x + attend(layer, q, k, v).reshape(x.shape).astype(np.float32) @ TO_OUT[layer]
    return x @ TO_TOKENS


def serve(waiting: deque[Request], max_running: int = 3) -> list[Request]:
    shape = (LAYERS, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    free, running, done = list(range(NUM_PAGES)), [], []
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append(waiting.popleft())
        for request in running:  # a page more where the last one is full
            needed = -(-len(request.tokens) // PAGE_SIZE)
            request.pages += [free.pop() for _ in range(needed - len(request.pages))]
        tables = np.full((len(running), max(len(request.pages) for request in running)), -1)
        for row, request in zip(tables, running, strict=True):
            row[: len(request.pages)] = request.pages
        q_lens = [len(request.tokens) - request.num_cached for request in running]
        kv_lens = [len(request.tokens) for request in running]
        batch = {"q_lens": q_lens, "kv_lens": kv_lens, "block_tables": tables}
        plan = cpattn.plan_attention(**batch, **POOL, **HEADS)
        slots = [slot for request in running for slot in request.slots]

        def attend(layer, q, k, v, slots=slots, plan=plan):
            k_cache[layer].reshape(-1, *k.shape[1:])[slots] = k
            v_cache[layer].reshape(-1, *v.shape[1:])[slots] = v
            return cpattn.run_attention(plan, q, k_cache[layer], v_cache[layer])

        logits = model([x for r in running for x in r.tokens[r.num_cached :]], attend)
        print(f"step: new tokens {q_lens}, tokens in all {kv_lens}, {len(free)} pages free")
        for request, last in zip(running, np.cumsum(q_lens) - 1, strict=True):
            request.num_cached = len(request.tokens)
            request.tokens.append(int(logits[last].argmax()))
            if len(request.generated) == request.max_new:
                free += request.pages
                done.append(request)
        running = [request for request in running if request not in done]
    return done


def oracle(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Of one sequence, whose keys and values are one page."""
    lens = {"q_lens": [len(q)], "kv_lens": [len(q)], "block_tables": [[0]]}
    return cpattn.reference.paged_attention(q, k[None], v[None], **lens)[0]


if __name__ == "__main__":
    sizes = {40: 4, 3: 6, 17: 3, 60: 2}  # tokens of the prompt: tokens to generate
    requests = [Request(rng.integers(VOCABULARY, size=n).tolist(), n, m) for n, m in sizes.items()]
    for request in serve(deque(requests)):
        logits = model(request.tokens[:-1], oracle)
        assert request.generated == logits[request.num_prompt - 1 :].argmax(axis=1).tolist()
        print(f"prompt of {request.num_prompt}: {request.generated}, as the oracle has it")
