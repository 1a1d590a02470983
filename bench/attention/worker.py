# SPDX-License-Identifier: Apache-2.0
"""One contender in its own process: ``python -m bench.attention.worker MODULE THREADS``."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.attention.peers import ADD_ALIBI, DISTRIBUTIONS, SEE_BEHIND, Unsupported
from bench.attention.workloads import Workload
from bench.harness import worker
from bench.harness.figures import Row


class Worker:
    """Commands are its public methods."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.name, self.num_threads = name, num_threads
        self.peer = importlib.import_module(f"bench.attention.peers.{name}")
        self.version = version(DISTRIBUTIONS[name]) if name in DISTRIBUTIONS else ""
        self.prepared: dict[str, Any] = {}
        self.loaded: Any = None

    def prepare(self, work: Row, folder: str, out: str, which: str = "") -> Row:
        """Set a workload up, run it once, and leave the result in the file `out`.

        With `which` it joins the others on the same cache; else it is the only one.
        """
        from bench.attention.peers import inputs  # and torch, not before the threads are bound

        if not which:
            self.forget()
        tuples = {name: tuple(value) for name, value in work.items() if isinstance(value, list)}
        workload = Workload(**(work | tuples))
        self.loaded = inputs.load(workload, Path(folder), self.loaded)
        if workload.behind and self.name not in SEE_BEHIND:
            return {"unsupported": "a window on both sides"}
        if workload.alibi and self.name not in ADD_ALIBI:
            return {"unsupported": "ALiBi"}
        try:
            prepared = self.peer.prepare(workload, self.loaded, self.num_threads)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        self.prepared[which] = prepared
        extra, (stage, run, result) = worker.extra_memory(lambda: self.call(which))
        inputs.output(workload, Path(out)).copy_(result)
        return {
            "stage": stage,
            "run": run,
            "extra_memory": max(0, extra - workload.out_bytes),
            "note": prepared.note,
            "compiled": prepared.compiled(),
        }

    def forget(self) -> Row:
        """Give the memory of all workloads back."""
        self.prepared, self.loaded = {}, None
        if hasattr(self.peer, "KEPT"):
            self.peer.KEPT.forget()
        gc.collect()
        return {}

    def sample(self, calls: int, which: str = "") -> Row:
        """Mean seconds of `calls` calls; a warm-up call precedes many short ones."""
        if calls > 1:
            self.call(which)
        times = [self.call(which)[:2] for _ in range(calls)]
        stages, runs = zip(*times, strict=True)
        return {"stage": sum(stages) / calls, "run": sum(runs) / calls}

    def call(self, which: str) -> tuple[float, float, Any]:
        prepared = self.prepared[which]
        begin = time.perf_counter()
        staged = prepared.stage()
        middle = time.perf_counter()
        result = prepared.run(staged)
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
