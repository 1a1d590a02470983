# SPDX-License-Identifier: Apache-2.0
"""One contender in a process of its own: ``python -m bench.attention.worker MODULE THREADS``."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.attention.peers import DISTRIBUTIONS, Unsupported
from bench.attention.workloads import Workload
from bench.harness import worker
from bench.harness.figures import Row


class Worker:
    """Commands are its public methods."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.peer = importlib.import_module(f"bench.attention.peers.{name}")
        self.version = version(DISTRIBUTIONS[name]) if name in DISTRIBUTIONS else ""
        self.prepared: Any = None

    def prepare(self, work: Row, folder: str, out: str) -> Row:
        """Set a workload up, run it once, and leave the result in the file `out`."""
        from bench.attention.peers import inputs  # and torch, not before the threads are bound

        self.prepared = None
        gc.collect()
        tuples = {name: tuple(value) for name, value in work.items() if isinstance(value, list)}
        workload = Workload(**(work | tuples))
        tensors = inputs.load(workload, Path(folder))
        try:
            self.prepared = self.peer.prepare(workload, tensors, self.num_threads)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        extra, (stage, run, result) = worker.extra_memory(self.call)
        inputs.output(workload, Path(out)).copy_(result)
        return {
            "stage": stage,
            "run": run,
            "extra_memory": max(0, extra - workload.out_bytes),
            "note": self.prepared.note,
            "compiled": self.prepared.compiled(),
        }

    def sample(self, calls: int) -> Row:
        """Mean seconds of `calls` calls; before many short ones, one that warms the caches."""
        if calls > 1:
            self.call()
        times = [self.call()[:2] for _ in range(calls)]
        stages, runs = zip(*times, strict=True)
        return {"stage": sum(stages) / calls, "run": sum(runs) / calls}

    def call(self) -> tuple[float, float, Any]:
        begin = time.perf_counter()
        staged = self.prepared.stage()
        middle = time.perf_counter()
        result = self.prepared.run(staged)
        return middle - begin, time.perf_counter() - middle, result


def main() -> None:
    name, num_threads = sys.argv[1], int(sys.argv[2])
    worker.end_with_parent()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])
    answer = worker.answers_only()
    try:
        contender = Worker(name, num_threads)
    except ModuleNotFoundError as error:
        return answer({"missing": str(error)})
    gc.disable()
    return worker.serve(contender, answer)


if __name__ == "__main__":
    main()
