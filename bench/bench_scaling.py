# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over 1, 2 and 4 processes, against what `cpattn plan` predicts.

Every rank has one thread, pinned to a CPU. Where ranks outnumber CPUs, wall times are of ranks that
wait for each other's CPU; the CPU time of a rank is its work all the same, and is what attention
is compared by. Rates are measured first, those of attention also with all CPUs at work, for as many
ranks or more: cores slow each other down. The network is the loopback device.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import cpattn
from cpattn import torch_guard
from cpattn.cost_model import AttentionLayer, Prediction, predict
from cpattn.cost_model.calibration import attention_rates, calibrate
from cpattn.cost_model.prediction import as_options

SIZES = (1, 2, 4)
STRATEGIES = ("zigzag", "contiguous")
DIGEST_BYTES = 64  # to each peer, before the rows
BATCHES = {
    "1 × 8192": ([8192], [0]),
    "4 behind prefixes": ([3000, 700, 4096, 64], [0, 4096, 512, 8192]),
    "16 × 256": ([256] * 16, [0] * 16),
}
QUICK = {"1 × 512": ([512], [0])}


@dataclass(frozen=True)
class Measured:
    """One rank in one case; seconds are medians."""

    attend_cpu: float
    attend: float
    write_kv: float
    sent_bytes: int


def run_rank(
    rank: int, size: int, store: str, layer: AttentionLayer, batches: dict[str, Any], repeats: int
) -> dict[tuple[str, str], Measured]:
    """All cases on one rank, in a process of its own."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cpattn.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    answer = {
        (name, strategy): measure(layer, batch, strategy, repeats)
        for name, batch in batches.items()
        for strategy in STRATEGIES
    }
    dist.barrier()
    dist.destroy_process_group()
    return answer


def measure(layer: AttentionLayer, batch: Any, strategy: str, repeats: int) -> Measured:
    import torch
    import torch.distributed as dist

    from cpattn.distributed import ContextParallel

    cp = ContextParallel(dist.group.WORLD, strategy=strategy, page_size=layer.page_size)
    extends, prefixes = map(np.array, batch)
    pages = -(-(extends + prefixes) // layer.page_size)
    tables = np.full((len(pages), pages.max()), -1, np.int32)
    tables[np.arange(pages.max()) < pages[:, None]] = np.arange(pages.sum())
    plan = cp.plan(extends, extends + prefixes, block_tables=tables)
    dtype = getattr(torch, layer.dtype)
    kv_shape = (layer.page_size, layer.num_kv_heads, layer.head_dim)
    k_cache, v_cache = (torch.randn(int(pages.sum()), *kv_shape).to(dtype) for _ in "kv")
    k, v = (torch.randn(plan.num_local_rows, *kv_shape[1:]).to(dtype) for _ in "kv")
    q = torch.randn(plan.num_local_rows, layer.num_heads, layer.head_dim).to(dtype)
    sent = 0

    def counting(block: Any, *arguments: Any) -> Any:
        nonlocal sent
        sent += block.numel() * block.element_size()
        return isend(block, *arguments)

    isend = dist.isend
    with mock.patch.object(dist, "isend", counting):
        cp.write_kv(plan, k, v, k_cache, v_cache)
    cp.attend(plan, q, k_cache, v_cache)
    times = []
    for _ in range(repeats):  # layer after layer
        dist.barrier()
        begin = time.perf_counter()
        cp.write_kv(plan, k, v, k_cache, v_cache)
        written, cpu = time.perf_counter(), time.thread_time()
        cp.attend(plan, q, k_cache, v_cache)
        times.append((time.thread_time() - cpu, time.perf_counter() - written, written - begin))
    return Measured(*map(median, zip(*times, strict=True)), sent - (cp.cp_size - 1) * DIGEST_BYTES)


def run_world(size: int, *arguments: Any) -> list[dict[tuple[str, str], Measured]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, get_context("spawn")) as pool,
    ):
        store = f"file://{folder}/store"
        ranks = [pool.submit(run_rank, rank, size, store, *arguments) for rank in range(size)]
        return [rank.result() for rank in ranks]


def new_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("batch", "strategy"):
        table.add_column(name, no_wrap=True)
    for name in (
        "ranks",
        "attention, CPU ms by rank",
        "measured",
        "worst",
        "imbalance",
        "measured",
        "sent, MiB",
        "gather + store, ms",
        "measured",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def row_of(name: str, forecast: Prediction, ranks: list[Measured]) -> tuple[list[str], float]:
    """The cells of a case, and the largest error of a rank's attention, relative."""
    cpu = np.array([rank.attend_cpu for rank in ranks])
    errors = forecast.attention_seconds / cpu - 1
    worst = float(errors[np.abs(errors).argmax()])
    assert [rank.sent_bytes for rank in ranks] == forecast.sent_bytes.tolist()
    gather = forecast.slowest_gather_seconds + forecast.store_seconds
    cells = [
        name,
        forecast.strategy,
        str(forecast.cp_size),
        milliseconds(forecast.attention_seconds),
        milliseconds(cpu),
        f"{worst:+.0%}",
        f"{forecast.attention_seconds.max() / forecast.attention_seconds.mean():.2f}",
        f"{cpu.max() / cpu.mean():.2f}",
        f"{forecast.sent_bytes.max() / 2**20:.2f}",
        f"{1e3 * gather:.1f}",
        f"{1e3 * min(rank.write_kv for rank in ranks):.1f}",
    ]
    return cells, abs(worst)


def milliseconds(seconds: Any) -> str:
    return " ".join(f"{1e3 * value:.3g}" for value in seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small batch, 1 and 2 ranks")
    quick = parser.parse_args().quick
    batches, sizes = (QUICK, SIZES[:2]) if quick else (BATCHES, SIZES)
    layer = AttentionLayer(num_heads=8, num_kv_heads=2)
    alone = calibrate(layer, threads=1)
    cpus = len(os.sched_getaffinity(0))
    together = attention_rates(layer, cpus)
    crowded = replace(alone, **together | {"gflops": together["gflops"] / cpus})
    console = Console(width=170)
    for name, rates in (("alone", alone), (f"one of {cpus}", crowded)):
        text = f"a rank {name}: {as_options(vars(rates))}"
        console.print(text, highlight=False, soft_wrap=True)
    table, worst = new_table(), 0.0
    measured = {size: run_world(size, layer, batches, 1 if quick else 3) for size in sizes}
    for name, batch in batches.items():
        for strategy in STRATEGIES:
            for size in sizes:
                rates = alone if size < cpus else crowded
                forecast = predict([batch], layer, rates, cp_size=size, strategy=strategy)
                ranks = [answers[name, strategy] for answers in measured[size]]
                cells, error = row_of(name, forecast, ranks)
                table.add_row(*cells)
                worst = max(worst, error)
    console.print(table)
    console.print(f"attention of a rank is predicted within {worst:.0%}, bytes exactly")
    return 0


if __name__ == "__main__":
    if message := torch_guard.prepare():
        print(message)
    raise SystemExit(main())
