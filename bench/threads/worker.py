# SPDX-License-Identifier: Apache-2.0
"""Short calls on several threads, and products of torch, in a separate process.

    python -m bench.threads.worker THREADS POOL

POOL is one of `set_thread_pool`; ``CPATTN_SPIN_US`` of its environment sets how long cpattn's own
threads spin.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

import cpattn
from bench.harness import worker
from bench.harness.figures import Row
from cpattn.integrations._torch_threads import ThreadPool, set_thread_pool

#: Sequences, keys of each, heads, those of keys, head_dim.
CALLS = {"empty": (2, 1, 1, 1, 16), "decode 8 × 1, KV 200": (8, 200, 16, 4, 128)}
PRODUCT = (64, 1024, 1024)  # rows and sides of a product: hundreds of microseconds


class Worker:
    """Commands are its public methods. All times are in seconds."""

    def __init__(self, num_threads: int, pool: ThreadPool) -> None:
        self.version = cpattn.__version__
        torch.set_num_threads(num_threads)
        cpattn.set_num_threads(num_threads)
        set_thread_pool(pool)
        self._calls = {name: attention(*sizes) for name, sizes in CALLS.items()}
        rows, inner, columns = PRODUCT
        self._weights = torch.randn(columns, inner).bfloat16()
        self._rows = torch.randn(rows, inner).bfloat16()

    def after_pauses(self, call: str, pause: float, times: int) -> Row:
        """Times of calls with a pause before each, in which the caller is busy."""
        return spread_of([taken(self._calls[call], pause) for _ in range(times)])

    def in_turn(self, call: str, times: int) -> Row:
        """Times of calls, and of torch's products between them, as in the layers of a model."""
        calls, products = [], []
        for _ in range(times):
            products.append(taken(self._product))
            calls.append(taken(self._calls[call]))
        both = [sum(pair) for pair in zip(calls, products, strict=True)]
        return {
            "call": spread_of(calls),
            "product": spread_of(products),
            "both": spread_of(both),
        }

    def products(self, seconds: float) -> Row:
        """The number of products a second."""
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._product()
            count += 1
        return {"rate": count / seconds}

    def calls_for(self, seconds: float, call: str, pause: float) -> Row:
        """Times of calls for a number of seconds."""
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            times.append(taken(self._calls[call], pause))
        return spread_of(times)

    def _product(self) -> None:
        torch.nn.functional.linear(self._rows, self._weights)


def attention(
    sequences: int, length: int, heads: int, kv_heads: int, dim: int
) -> Callable[[], object]:
    """One query of each sequence; the plan is made beforehand, as for all but the first layer."""
    page = 16
    pages = -(-length // page)
    tables = torch.arange(sequences * pages, dtype=torch.int32).view(sequences, pages)
    q = torch.randn(sequences, heads, dim).bfloat16()
    caches = [torch.randn(sequences * pages, page, kv_heads, dim).bfloat16() for _ in range(2)]
    plan = cpattn.plan_attention(
        q_lens=[1] * sequences,
        kv_lens=[length] * sequences,
        block_tables=tables,
        page_size=page,
        num_pages=len(caches[0]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
    )
    out = torch.empty_like(q)
    return lambda: cpattn.run_attention(plan, q, *caches, out=out)


def taken(call: Callable[[], object], pause: float = 0.0) -> float:
    begin = time.perf_counter() + pause
    while time.perf_counter() < begin:
        pass
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def spread_of(times: list[float]) -> Row:
    return {"median": median(times), "ninetieth": quantiles(times, n=10)[-1]}


def main() -> None:
    worker.end_with_parent()
    answer = worker.answers_only()
    _, threads, pool = sys.argv
    made = Worker(int(threads), pool)  # type: ignore[arg-type]
    gc.disable()
    worker.serve(made, answer)


if __name__ == "__main__":
    main()
