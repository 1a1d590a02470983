# SPDX-License-Identifier: Apache-2.0
"""One contender in a process of its own: ``python -m peers.worker MODULE THREADS``.

A command a line comes in, an answer a line goes out, JSON both. A contender that crashes takes
only this process with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import DISTRIBUTIONS, Unsupported
from workloads import Workload

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
Answer = dict[str, Any]


class Worker:
    """Commands are its public methods."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.peer = importlib.import_module(f"peers.{name}")
        self.version = version(DISTRIBUTIONS[name]) if name in DISTRIBUTIONS else ""
        self.prepared: Any = None

    def prepare(self, work: Answer, folder: str, out: str) -> Answer:
        """Set a workload up, run it once, and leave the result in the file `out`."""
        from peers import inputs  # and torch, not before the threads are bound

        self.prepared = None
        gc.collect()
        tuples = {name: tuple(value) for name, value in work.items() if isinstance(value, list)}
        workload = Workload(**(work | tuples))
        tensors = inputs.load(workload, Path(folder))
        try:
            self.prepared = self.peer.prepare(workload, tensors, self.num_threads)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        LIBC.malloc_trim(0)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
        stage, run, result = self.call()
        extra = memory("VmHWM") - before - workload.out_bytes
        inputs.output(workload, Path(out)).copy_(result)
        return {
            "stage": stage,
            "run": run,
            "extra_memory": max(0, extra),
            "note": self.prepared.note,
            "compiled": self.prepared.compiled(),
        }

    def sample(self, calls: int) -> Answer:
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


def memory(field: str) -> int:
    """Bytes, from this process's status."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s*(\d+)", status)[1])


def main() -> None:
    name, num_threads = sys.argv[1], int(sys.argv[2])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer

    def answer(message: Answer) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        worker = Worker(name, num_threads)
    except ModuleNotFoundError as error:
        return answer({"missing": str(error)})
    answer({"version": worker.version})
    gc.disable()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(getattr(worker, command.pop("do"))(**command))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    return None


if __name__ == "__main__":
    main()
