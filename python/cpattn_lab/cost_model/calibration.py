# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine, fitted to timed attention calls and two processes over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from cpattn import _core
from cpattn._limits import check_integer

from ..processes.workers import Role, Workers
from .layer import AttentionLayer
from .rates import Rates
from .work import rank_work

_LONGEST_CALL = 0.1  # about so many seconds
_NUM_SHAPES, _NUM_LONG = 8, 2  # batches that are timed on one thread, and on many
_PATIENCE = 120.0  # seconds for two processes on a busy machine


class Sample(NamedTuple):
    """One call of attention: its work, and its seconds."""

    products: float  # flops of visible scores
    packing: float  # flops of a row with every packed key
    rows: float  # flops of every row with one key
    seconds: float


def calibrate(
    layer: AttentionLayer,
    *,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Rates:
    """Measure the rates of this machine: attention here, the exchange between two processes.

    The call takes a few seconds and needs torch. `cpattn_lab.check` measures the exchange between
    two machines.

    Parameters
    ----------
    layer : AttentionLayer
    threads : int, optional
        Threads of a rank. Default: the threads of a call without `num_threads`.
    progress : callable
        Called with the name of the next measurement.
    """
    # Rates are for any keys, including biases of their scores.
    layer = replace(layer, window=None, latent=False)
    threads = _core.default_num_threads() if threads is None else threads
    check_integer("calibrate", "threads", threads)
    attention = attention_rates(layer, threads, progress)
    progress("merging of partial results")
    merging = {"merge_ns": _merge_rate(layer, threads)}
    progress("exchange between two processes")
    return Rates(**attention, **merging, threads=threads, **_exchange_rates(threads))


def num_steps(threads: int) -> int:
    """Return the number of calls of `progress` in `calibrate`."""
    return _NUM_SHAPES + _NUM_LONG + (_NUM_LONG if threads > 1 else 0) + 3


def attention_rates(
    layer: AttentionLayer, threads: int, progress: Callable[[str], None] = lambda what: None
) -> dict[str, float]:
    """Return the rates of attention: ``gflops`` of all threads, and costs.

    All threads read the keys of decode steps, as they share the memory. Other costs than products
    are measured on one thread: short batches have too few items for many threads, so idle threads
    would distort them.
    """

    def timed(
        shapes: list[tuple[list[int], int]], threads: int, *, lse: bool = False
    ) -> list[Sample]:
        samples = []
        for extends, prefix in shapes:
            many = f"{threads} thread{'s' * (threads > 1)}{', with LSE' * lse}"
            progress(f"attention, {len(extends)} × {extends[0]} new behind {prefix}, {many}")
            samples.append(_sample(layer, extends, prefix, threads, lse=lse))
        return samples

    shapes = _shapes(layer, _core.measure_peak(layer.dtype, 1))
    samples = timed(shapes, 1)
    rates = fit(samples)
    rates["lse_share"] = lse_share(samples[:_NUM_LONG], timed(shapes[:_NUM_LONG], 1, lse=True))
    if threads > 1:
        long = _shapes(layer, _core.measure_peak(layer.dtype, threads))[:_NUM_LONG]
        rates["gflops"] = _gflops(timed(long, threads), rates)
    sequences, prefix = [1] * 8, sum(shapes[0][0])
    progress(f"attention, a step of {len(sequences)} behind {prefix}, {threads} threads")
    step = _sample(layer, sequences, prefix, threads, batch_invariant=False)
    rates["read_rows"] = read_rows(step, rates)
    return rates


def read_rows(step: Sample, rates: dict[str, float]) -> float:
    """Return the cost of reading a key that explains a decode step, given the other rates."""
    flops = (step.seconds - 1e-6 * rates["call_us"]) * 1e9 * rates["gflops"]
    flops -= step.products + rates["row_keys"] * step.rows
    return max(flops / step.packing, 0.0)


def _gflops(samples: list[Sample], rates: dict[str, float]) -> float:
    """Return the rate of products that fits the samples, given the other rates."""
    products, packing, rows, seconds = np.sum(samples, axis=0)
    flops = products + rates["pack_rows"] * packing + rates["row_keys"] * rows
    return float(flops / (seconds - len(samples) * 1e-6 * rates["call_us"]) / 1e9)


def lse_share(without: list[Sample], with_lse: list[Sample]) -> float:
    """Return the extra time of an LSE as a share of the products' time of the same calls."""
    seconds = sum(sample.seconds for sample in without)
    return max(sum(sample.seconds for sample in with_lse) / seconds - 1, 0.0)


def _merge_rate(layer: AttentionLayer, threads: int) -> float:
    import torch

    from ..check.measure import measure_merge

    dtype = getattr(torch, layer.dtype)
    return measure_merge(layer.num_heads, layer.v_dim, dtype, threads)


def fit(samples: list[Sample]) -> dict[str, float]:
    """Return the rates that fit all samples best, each weighted by its length::

    seconds = (products + pack_rows * packing + row_keys * rows) / flops + call
    """
    table = np.array(samples)
    terms = np.column_stack([table[:, :-1], np.ones(len(table))])
    chosen = list(range(terms.shape[1]))
    while True:  # a negative term is dropped
        relative = terms[:, chosen] / table[:, -1:]
        values = np.linalg.lstsq(relative, np.ones(len(table)), rcond=None)[0]
        if values.min() >= 0:
            break
        chosen.remove(chosen[int(values.argmin())])
    per_flop, per_packing, per_row, call = np.bincount(chosen, values, minlength=4)
    if not per_flop:
        raise RuntimeError("calibrate: the timings make no sense; is the machine busy?")
    return {
        "gflops": float(1e-9 / per_flop),
        "pack_rows": float(per_packing / per_flop),
        "row_keys": float(per_row / per_flop),
        "call_us": float(1e6 * call),
    }


def _shapes(layer: AttentionLayer, peak: float) -> list[tuple[list[int], int]]:
    """Return batches (extend_lens, prefix) from long chunks to single rows."""
    budget = _LONGEST_CALL * peak / (2 * layer.dims * layer.num_heads)  # pairs
    tokens = int(np.clip(2 ** np.floor(np.log2(np.sqrt(2 * budget))), 256, 8192))
    return [
        ([tokens], 0),
        ([tokens // 8], 4 * tokens),
        ([tokens // 8] * 8, 0),
        ([tokens // 32] * 16, 0),
        ([tokens // 32], 4 * tokens),
        ([8], 2 * tokens),
        ([2] * 8, tokens),
        ([1], 16),
    ]


def _sample(
    layer: AttentionLayer,
    extends: list[int],
    prefix: int,
    threads: int,
    *,
    lse: bool = False,
    batch_invariant: bool = True,
) -> Sample:
    import torch

    from cpattn.attention import plan_attention, run_attention

    lens = [prefix + n for n in extends]
    pages = [-(-n // layer.page_size) for n in lens]
    tables = np.full((len(lens), max(pages)), -1, np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(pages), pages, strict=True)):
        tables[row, :count] = np.arange(end - count, end)
    dtype = getattr(torch, layer.dtype)
    v_dim = layer.dims - layer.head_dim
    shape = (sum(pages), layer.page_size, layer.num_kv_heads)
    k, v = (torch.randn(*shape, dim, dtype=dtype) for dim in (layer.head_dim, v_dim))
    q = torch.randn(sum(extends), layer.num_heads, layer.head_dim, dtype=dtype)
    biases: dict[str, Any] = {}
    if layer.bias == "alibi":
        biases["alibi_slopes"] = torch.full((layer.num_heads,), 0.01)
    elif layer.bias is not None:
        numbers = torch.zeros(1, 1, max(extends), max(lens), dtype=getattr(torch, layer.bias))
        biases["bias"] = numbers.expand(-1, layer.num_heads, -1, -1)
    times = []
    for _ in range(5):  # a call includes its plan, as in every layer of an engine
        begin = time.perf_counter()
        plan = plan_attention(
            q_lens=extends,
            kv_lens=lens,
            block_tables=tables,
            page_size=layer.page_size,
            num_pages=len(k),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=v_dim,
            batch_invariant=batch_invariant,
            num_threads=threads,
        )
        run_attention(plan, q, k, v, scale=0.1, return_lse=lse, **biases)
        times.append(time.perf_counter() - begin)
    work = rank_work(extends, lens, cp_size=1, strategy="contiguous", layer=layer)
    flops = 2 * layer.dims
    return Sample(
        float(work.pairs[0]) * layer.num_heads * flops,
        float(work.packed_keys[0]) * layer.num_kv_heads * flops,
        float(work.tokens[0]) * layer.num_heads * flops,
        median(times),
    )


def _exchange_rates(threads: int) -> dict[str, float]:
    """Measure the exchange between two processes on the threads of one rank."""
    each = max(threads // 2, 1)
    target = f"{__name__}.ExchangeRank"
    roles = [Role(f"process {rank} of the exchange", target, rank, each) for rank in range(2)]
    with Workers(roles) as workers:
        workers.call(range(2), "measure")
        rates: dict[str, float] = workers.answers(range(2))[0]
    return rates


class ExchangeRank:
    """One of two processes that exchange rows, a worker of `Workers`."""

    def __init__(self, rank: int, threads: int, init_method: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        timeout = timedelta(seconds=_PATIENCE)
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=2, timeout=timeout
        )

    def __enter__(self) -> ExchangeRank:
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def measure(self) -> dict[str, float]:
        """Run `measure_exchange`."""
        import torch.distributed as dist

        from ..check.measure import measure_exchange

        assert dist.group.WORLD
        rates = measure_exchange(dist.group.WORLD)
        dist.barrier()
        return rates
