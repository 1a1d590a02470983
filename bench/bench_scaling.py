# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over 1, 2 and 4 processes, against what `cpattn plan` predicts.

Every rank has one thread, pinned to a CPU. Where ranks outnumber CPUs, wall times are of ranks that
wait for each other's CPU; the CPU time of a rank is its work all the same, and is what attention
is compared by. Rates are measured first, those of attention also with all CPUs at work, for as many
ranks or more: cores slow each other down. The network is the loopback device.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench.context_parallel.ranks import STRATEGIES, Measured, run_world
from bench.harness import command
from cpattn import torch_guard
from cpattn._cli.rates import as_options
from cpattn.cost_model import AttentionLayer, Prediction, predict
from cpattn.cost_model.calibration import attention_rates, calibrate

SIZES = (1, 2, 4)
BATCHES = {
    "1 × 8192": ([8192], [0]),
    "4 behind prefixes": ([3000, 700, 4096, 64], [0, 4096, 512, 8192]),
    "16 × 256": ([256] * 16, [0] * 16),
}
QUICK = {"1 × 512": ([512], [0])}


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
    parser = command.parser(__doc__, quick="one small batch, 1 and 2 ranks")
    quick = parser.parse_args().quick
    batches, sizes = (QUICK, SIZES[:2]) if quick else (BATCHES, SIZES)
    layer = AttentionLayer(num_heads=8, num_kv_heads=2)
    alone = calibrate(layer, threads=1)
    cpus = len(os.sched_getaffinity(0))
    together = attention_rates(layer, cpus)
    slower: dict[str, Any] = together | {"gflops": together["gflops"] / cpus}
    crowded = replace(alone, **slower)
    console = Console(width=170)
    for name, rates in (("alone", alone), (f"one of {cpus}", crowded)):
        text = f"a rank {name}: {as_options(vars(rates))}"
        console.print(text, highlight=False, soft_wrap=True)
    table, worst = new_table(), 0.0
    measured = {size: run_world(size, layer, batches, 1 if quick else 3) for size in sizes}
    for name, (extend_lens, prefix_lens) in batches.items():
        batch = extend_lens, [n + p for n, p in zip(extend_lens, prefix_lens, strict=True)]
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
