# SPDX-License-Identifier: Apache-2.0
"""Paged attention against the attention of every engine that installs on a CPU.

    python bench/bench_attention.py [--quick] [--resume] [--only TEXT] [--trace FILE]

Rows are kept as they come; ``--resume`` continues after the last complete case. The peers run in
the environment of ``make bench-env``; missing peers are rows that say so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import cpattn
from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.attention import workloads
from bench.attention.peers import NAMES, QUICK
from bench.attention.race import contenders, race
from bench.attention.report import print_case, print_summary
from bench.attention.workloads import Case
from bench.harness import command
from bench.harness.contender import Contender
from bench.harness.environment import environment, results_file
from bench.harness.figures import Row
from bench.harness.worker import ROOT
from cpattn import _core

PEER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"


def parse_arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, quick="small cases, results not kept")
    parser.add_argument("--resume", action="store_true", help="keep the cases of a stopped run")
    parser.add_argument("--only", default="", help="cases with this text in their names, not kept")
    parser.add_argument(
        "--peers", default="", help="modules of bench/peers, by commas; default: all"
    )
    command.add_trace(parser)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of samples per peer")
    parser.add_argument("--peers-python", type=Path, default=PEER_PYTHON, help="their interpreter")
    return parser.parse_args()


class Run:
    """The cases of a run, and the rows of finished ones."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.kept = not (arguments.quick or arguments.only or arguments.peers)
        self.environment = environment()
        self.results = results_file("attention", self.environment)
        self.unfinished = self.results.with_suffix(".jsonl.part")
        self.rows: list[Row] = []
        if self.kept and arguments.resume and self.unfinished.exists():
            lines = self.unfinished.read_text().splitlines()
            self.rows = [json.loads(line) for line in lines]
        self.threads = _core.default_num_threads()
        self._file = None
        if self.kept:
            self._file = self.unfinished.open("a" if self.rows else "w")

    def cases(self) -> list[Case]:
        cases = workloads.quick() if self.arguments.quick else workloads.full(self.arguments.trace)
        done = {(row["case"]["workload"], row["case"]["threads"]) for row in self.rows}
        return [
            case
            for case in cases
            if self.arguments.only in case.workload.name
            and (case.workload.name, self.threads_of(case)) not in done
        ]

    def threads_of(self, case: Case) -> int:
        return self.threads if case.all_threads else 1

    def contenders(self, num_threads: int) -> dict[str, Contender]:
        python = self.arguments.peers_python
        if self.arguments.quick or not python.exists():
            python = Path(sys.executable)
        modules = list(QUICK if self.arguments.quick else NAMES)
        if self.arguments.peers:
            modules = ["ours", *self.arguments.peers.split(",")]
        return contenders(modules, num_threads, str(python))

    def add(self, case: Case, rows: list[Row]) -> list[Row]:
        """Add the description of a case to its rows, and keep them."""
        work = case.workload
        common = {
            "bench": "attention",
            "case": {"workload": work.name, "threads": self.threads_of(case)},
            "shape": asdict(work),
            "intensity": work.flop / work.bytes,
            "gflop": work.flop / 1e9,
            "series": case.series,
        }
        timed = {row["implementation"]: row for row in rows if row["status"] == "ok"}
        ours = timed.pop(NAMES["ours"], None)
        if ours:
            bar = case.amx_bar if self.environment["isa"] == "amx" else case.bar
            ours |= {"amx_bar": case.amx_bar, "base": case.base, "within": case.within}
            if bar:
                ours |= {"bar": bar, "missed": ours["percent_of_peak"] < bar}
            if timed:
                best = min(timed.values(), key=lambda row: row["median"])
                ours["best_peer"] = best["implementation"]
                ours["speedup"] = best["median"] / ours["median"]
                unstaged = min(row["median"] - row["staging"] for row in timed.values())
                ours["speedup_unstaged"] = unstaged / ours["median"]
        rows = [common | row | self.environment for row in rows]
        self.rows += rows
        if self._file:
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()
        return rows

    def finish(self) -> None:
        if self._file:
            self._file.close()
            os.replace(self.unfinished, self.results)


def peak_of(case: Case, num_threads: int) -> Callable[[], float]:
    """flop/s of the multiply-add for the dtype, or bytes/s if memory is the limit."""
    work = case.workload
    if work.is_decode:
        return partial(_core.measure_read_bandwidth, num_threads)
    return partial(
        _core.measure_peak, "bfloat16" if work.dtype == "bfloat16" else "float32", num_threads
    )


def main() -> int:
    run = Run(parse_arguments())
    begin, cases = time.monotonic(), run.cases()
    children: dict[int, dict[str, Contender]] = {}
    for i, case in enumerate(cases):
        num_threads = run.threads_of(case)
        cpattn.set_num_threads(num_threads)
        if num_threads not in children:
            children[num_threads] = run.contenders(num_threads)
        rows = race(case, children[num_threads], peak_of(case, num_threads), run.arguments.budget)
        progress = f"{i + 1}/{len(cases)}, {time.monotonic() - begin:.0f} s"
        print_case(run.add(case, rows), progress)
    for group in children.values():
        for contender in group.values():
            contender.stop()
    run.finish()
    print_summary(run.rows)
    return int(any(row.get("missed") or row["status"] == "wrong" for row in run.rows))


if __name__ == "__main__":
    raise SystemExit(main())
