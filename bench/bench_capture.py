# SPDX-License-Identifier: Apache-2.0
"""Cost of a capture for a step of an engine: a plan, and attention of every layer.

    python bench/bench_capture.py [--quick] [--threads N]

Equal steps with and without a capture take turns. Prints figures and keeps none. Twenty seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
from rich.table import Table

import cpattn
from bench.harness import command
from bench.harness.environment import environment
from bench.harness.report import console
from cpattn.captures import capture
from cpattn_proof import read_captures

LAYERS, PAGE_SIZE = 36, 16
HEADS: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
#: By name: new tokens of each sequence, and its cached ones with these.
STEPS = {
    "decode, 1 x 2048": ([1], [2048]),
    "decode, 64 x 1024": ([1] * 64, [1024] * 64),
    "prefill, 512": ([512], [512]),
}


class Steps:
    """Steps of one batch on caches of random numbers."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], threads: int | None) -> None:
        pages = -(-max(kv_lens) // PAGE_SIZE)
        self._batch: dict[str, Any] = {
            "q_lens": q_lens,
            "kv_lens": kv_lens,
            "block_tables": np.arange(len(q_lens) * pages, dtype=np.int32).reshape(-1, pages),
            "page_size": PAGE_SIZE,
            "num_pages": len(q_lens) * pages,
            "num_threads": threads,
        }
        random = np.random.default_rng(0)
        shape = (len(q_lens) * pages, PAGE_SIZE, HEADS["num_kv_heads"], HEADS["head_dim"])
        self._cache = random.random(shape, np.float32)
        self._q = random.random((sum(q_lens), HEADS["num_heads"], HEADS["head_dim"]), np.float32)

    def run(self) -> Any:
        plan = cpattn.plan_attention(**self._batch, **HEADS)
        for _ in range(LAYERS):
            out = cpattn.run_attention(plan, self._q, self._cache, self._cache)
        return out

    def seconds(self, path: Path | None, times: int) -> float:
        """Seconds of a step, without the begin and the end of a capture."""
        with capture(path) if path else nullcontext():
            begin = time.perf_counter()
            for _ in range(times):
                self.run()
            return (time.perf_counter() - begin) / times


def check(steps: Steps, path: Path) -> None:
    """Check that a captured step has the bits of an uncaptured one, and is in the file."""
    expected = steps.run()
    with capture(path):
        assert np.array_equal(steps.run(), expected)
    assert len(read_captures([path]).of("run_attention")) == LAYERS


def main() -> int:
    parser = command.parser(__doc__, quick="a step of each")
    parser.add_argument("--threads", type=int, help="of a call (default: all CPUs)")
    options = parser.parse_args()
    rounds, least = (1, 0.0) if options.quick else (15, 0.2)
    table = Table(title=f"ms of a step of {LAYERS} layers")
    for name in ("step", "alone", "captured", "costs, %", "bytes of a step"):
        table.add_column(name, justify="left" if name == "step" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, lens) in enumerate(STEPS.items()):
            steps = Steps(*lens, options.threads)
            check(steps, Path(folder, f"{number}-checked"))
            times = max(1, round(least / steps.seconds(None, 1)))
            alone, captured = [], []
            for i in range(rounds):
                alone.append(steps.seconds(None, times))
                path = Path(folder, f"{number}-{i}")
                captured.append(steps.seconds(path, times))
            ratio = median(b / a for a, b in zip(alone, captured, strict=True))
            row = (1e3 * median(alone), 1e3 * median(captured), 100 * (ratio - 1))
            size = path.stat().st_size / times
            table.add_row(name, *(f"{value:.2f}" for value in row), f"{size:,.0f}")
    console().print(table)
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
