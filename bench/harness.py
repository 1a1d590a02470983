# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: nothing is timed before it is right.

    suite = Suite("merge_state", "cpattn.merge_state against torch")
    for num_tokens in suite.cases([1024, 4096], quick=[16]):
        peers = {"cpattn": cpattn.merge_state, "torch": torch_merge_state}
        suite.compare({"num_tokens": num_tokens}, peers, partial(make_inputs, num_tokens), bar=2.0)
    raise SystemExit(suite.finish())

The first implementation is the one under test, the last one the peer it is compared with.
``--quick`` runs the small cases a few times and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

import cpattn
from cpattn import _core
from figures import case_label, duration

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds per call; the spread is the width of the middle half of the samples."""

    median: float
    minimum: float
    spread: float
    samples: int
    calls_per_sample: int


class Suite:
    """The comparisons of one benchmark program, its command line, table and results file."""

    def __init__(self, name: str, description: str) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--quick", action="store_true", help="small cases, results not kept")
        parser.add_argument("--repeats", type=int, default=30, help="samples of each")
        arguments = parser.parse_args()
        self.name = name
        self.description = description
        self.quick: bool = arguments.quick
        self.repeats: int = 3 if arguments.quick else arguments.repeats
        self.rows: list[dict[str, Any]] = []
        self.environment = environment()

    def cases(self, cases: Sequence[T], *, quick: Sequence[T]) -> Sequence[T]:
        return quick if self.quick else cases

    def compare(
        self,
        case: dict[str, Any],
        implementations: Mapping[str, Callable[..., Any]],
        make_inputs: Callable[[], tuple[Any, ...]],
        *,
        assert_same: Callable[[Any, Any], None] = np.testing.assert_equal,
        work: tuple[float, str] | None = None,
        peak: Callable[[], float] | None = None,
        bar: float | None = None,
    ) -> dict[str, Timing]:
        """Check every implementation against the peer, then time them in turns.

        The implementations are called with what `make_inputs` returns, fresh for every sample
        and made outside the measured time. ``assert_same(result, expected)`` raises where a
        result is wrong. `work` is the (amount, unit) of one call, such as ``(12.5, "GFLOP")``,
        `bar` the speed-up over the peer that the first implementation has to reach, `peak` the
        machine's limit in units of work per second, measured before and after.
        """
        first, *_, peer = implementations
        expected = implementations[peer](*make_inputs())
        for function in implementations.values():
            assert_same(function(*make_inputs()), expected)
        peaks = [peak()] if peak else []
        timings = _time_in_turns(implementations, make_inputs, self.repeats)
        peaks += [peak()] if peak else []
        for name, timing in timings.items():
            row = {"bench": self.name, "case": case, "implementation": name} | asdict(timing)
            row["speedup"] = timings[peer].median / timing.median
            if work:
                row |= {"rate": work[0] / timing.median, "unit": work[1]}
            if work and peaks:
                row |= {"peak": max(peaks), "percent_of_peak": 100 * row["rate"] / max(peaks)}
            if bar and name == first:
                row |= {"bar": bar, "missed": row["speedup"] < bar}
            self.rows.append(row)
        return timings

    def finish(self) -> int:
        """Print the table and keep the results. The exit code: 1 if a bar was missed."""
        self._print()
        if self.quick:
            return 0
        RESULTS.mkdir(exist_ok=True)
        lines = "".join(json.dumps(row | self.environment) + "\n" for row in self.rows)
        (RESULTS / f"{self.name}.jsonl").write_text(lines)
        return int(any(row.get("missed") for row in self.rows))

    def _print(self) -> None:
        table = Table(title=self.description)
        columns = "case implementation median minimum spread rate of-peak speed-up bar"
        for i, column in enumerate(columns.split()):
            table.add_column(column, justify="right" if i > 1 else "left", no_wrap=True)
        previous = None
        for row in self.rows:
            case = case_label(row["case"])
            table.add_row(
                case if case != previous else "",
                row["implementation"],
                duration(row["median"]),
                duration(row["minimum"]),
                f"{row['spread'] / row['median']:.0%}",
                f"{row['rate']:.1f} {row['unit']}/s" if "unit" in row else "",
                f"{row['percent_of_peak']:.0f} %" if "peak" in row else "",
                f"{row['speedup']:.1f}x",
                f"{row['bar']:g}x {'MISSED' if row['missed'] else 'met'}" if "bar" in row else "",
            )
            previous = case
        console = Console()
        Console(width=None if console.is_terminal else 170).print(table)


def environment() -> dict[str, Any]:
    """What a figure depends on: machine, instruction set, compiler, versions, commit."""
    return {
        "machine": _cpu_name(),
        "isa": cpattn.active_isa(),
        "num_threads": _core.default_num_threads(),
        "compiler": _core.__compiler__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "cpattn": cpattn.__version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _time_in_turns(
    implementations: Mapping[str, Callable[..., Any]],
    make_inputs: Callable[[], tuple[Any, ...]],
    repeats: int,
) -> dict[str, Timing]:
    """Interleaved, so that drift of the machine hits all alike; the collector is off."""
    calls = {}
    for name, function in implementations.items():
        once = _sample(function, make_inputs(), 1)
        calls[name] = max(1, min(10_000, int(2e-3 / once)))
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    gc.disable()
    try:
        for _ in range(repeats):
            for name, function in implementations.items():
                samples[name].append(_sample(function, make_inputs(), calls[name]))
    finally:
        gc.enable()
    return {name: _timing(values, calls[name]) for name, values in samples.items()}


def _sample(function: Callable[..., Any], inputs: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(*inputs)
    return (time.perf_counter() - start) / calls


def _timing(samples: list[float], calls: int) -> Timing:
    low, _, high = quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return Timing(median(samples), min(samples), high - low, len(samples), calls)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
