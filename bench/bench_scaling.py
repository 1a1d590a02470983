# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over 1, 2, 4 and 8 processes, against the prediction of `cpattn plan`.

Every rank has one thread, pinned to a CPU. The CPU time of a rank is its work even if others share
its CPU. If ranks outnumber CPUs, the wall time of the slowest rank includes the ranks that it waits
for: the rates of a rank are then divided by the ranks of a CPU. Times are of the slowest rank,
those of attention above 20 ms are to be within 10 %; balance is the slowest over the mean. Rates
are measured first, rates of attention also with all CPUs at work, for as many ranks or more: cores
slow each other down. The network is the loopback device.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
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
from cpattn_lab.cost_model import AttentionLayer, Prediction, Rates, predict
from cpattn_lab.cost_model.calibration import attention_rates, calibrate
from cpattn_lab.rate_options import as_options

SIZES = (1, 2, 4, 8)
LONG, BAR = 0.02, 0.1  # seconds of attention that are to be predicted so well
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
        "ranks", "CPU, ms", "worst", "wall, ms", "balance", "sent, MiB", "gather, ms",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    return table


def crowded(rates: Rates, size: int, cpus: int) -> Rates:
    """The rates of a rank that waits for the others of its CPU."""
    ranks = max(1.0, size / cpus)
    return replace(
        rates,
        gflops=rates.gflops / ranks,
        store_gb_per_s=rates.store_gb_per_s / ranks,
        call_us=rates.call_us * ranks,
        latency_us=rates.latency_us * ranks,
        message_us=rates.message_us * ranks,
    )


@dataclass(frozen=True)
class Error:
    """The error of a prediction of the slowest rank's attention, and the seconds that it is for."""

    case: str
    kind: str
    seconds: float
    relative: float


def verdict(errors: list[Error]) -> list[str]:
    """The number of times within the bar, and the cases outside."""
    long = [error for error in errors if error.seconds > LONG]
    missed = [error for error in long if abs(error.relative) > BAR]
    lines = [
        f"{len(long) - len(missed)} of {len(long)} times of attention above {1e3 * LONG:.0f} ms "
        f"are within {BAR:.0%}, bytes exact"
    ]
    lines += [f"  {miss.case}, {miss.kind}: {miss.relative:+.0%}" for miss in missed]
    return lines


def row_of(
    name: str, forecast: Prediction, waiting: Prediction, ranks: list[Measured]
) -> tuple[list[str], list[Error]]:
    """The cells of a case: predicted / measured; `waiting` is of ranks that share CPUs."""
    cpu = np.array([rank.attend_cpu for rank in ranks])
    errors = forecast.attention_seconds / cpu - 1
    worst = float(errors[np.abs(errors).argmax()])
    assert [rank.sent_bytes for rank in ranks] == forecast.sent_bytes.tolist()
    gather = waiting.slowest_gather_seconds + waiting.store_seconds
    times = {
        "CPU": (forecast.slowest_attention_seconds, float(cpu.max())),
        "wall": (waiting.slowest_attention_seconds, max(rank.attend for rank in ranks)),
    }
    case = f"{name}, {forecast.strategy}, {forecast.cp_size} ranks"
    errors = [
        Error(case, kind, measured, predicted / measured - 1)
        for kind, (predicted, measured) in times.items()
    ]
    even = forecast.attention_seconds.max() / forecast.attention_seconds.mean()
    cells = [
        name,
        forecast.strategy,
        str(forecast.cp_size),
        milliseconds(*times["CPU"]),
        f"{worst:+.0%}",
        milliseconds(*times["wall"]),
        f"{even:.2f} / {cpu.max() / cpu.mean():.2f}",
        f"{forecast.sent_bytes.max() / 2**20:.2f}",
        milliseconds(gather, min(rank.write_kv for rank in ranks)),
    ]
    return cells, errors


def milliseconds(*seconds: float) -> str:
    return " / ".join(f"{1e3 * value:.3g}" for value in seconds)


def main() -> int:
    parser = command.parser(__doc__, quick="one small batch, 1 and 2 ranks")
    quick = parser.parse_args().quick
    batches, sizes = (QUICK, SIZES[:2]) if quick else (BATCHES, SIZES)
    layer = AttentionLayer(num_heads=8, num_kv_heads=2)
    alone = calibrate(layer, threads=1)
    cpus = len(os.sched_getaffinity(0))
    together = attention_rates(layer, cpus)
    slower: dict[str, Any] = together | {"gflops": together["gflops"] / cpus}
    busy = replace(alone, **slower)
    console = Console(width=120)
    for name, rates in (("alone", alone), (f"one of {cpus}", busy)):
        text = f"a rank {name}: {as_options(vars(rates))}"
        console.print(text, highlight=False, soft_wrap=True)
    table, errors = new_table(), list[Error]()
    measured = {size: run_world(size, layer, batches, 1 if quick else 3) for size in sizes}
    for name, (extend_lens, prefix_lens) in batches.items():
        batch = extend_lens, [n + p for n, p in zip(extend_lens, prefix_lens, strict=True)]
        for strategy in STRATEGIES:
            for size in sizes:
                rates = alone if size < cpus else busy
                forecast, waiting = (
                    predict([batch], layer, each, cp_size=size, strategy=strategy)
                    for each in (rates, crowded(rates, size, cpus))
                )
                ranks = [answers[name, strategy] for answers in measured[size]]
                cells, off = row_of(name, forecast, waiting, ranks)
                table.add_row(*cells)
                errors += off
    console.print(table)
    console.print("Predicted / measured; gather is with the store.", *verdict(errors), sep="\n")
    return 0


if __name__ == "__main__":
    if message := torch_guard.prepare():
        print(message)
    raise SystemExit(main())
