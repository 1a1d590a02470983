# SPDX-License-Identifier: Apache-2.0
"""Steps of sglang's engine, with torch_native and with cpattn."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from bench.harness.contender import Contender
from bench.serving.sglang_process import BACKENDS, ENVIRONMENT, started_by
from bench.serving.steps import STEPS, Case

CASES: tuple[Case, ...] = (
    Case(1, 512, bar=1.4),
    Case(1, 2048, bar=1.8),
    Case(1, 4096, bar=2.6),
    Case(1, 2048, STEPS, bar=4.5),
    Case(8, 1024, STEPS, bar=6.5),
)
QUICK_CASES: tuple[Case, ...] = (Case(1, 96), Case(2, 100, 4))


class Engine(Contender):
    """A child process with sglang's offline engine."""

    answer_seconds = 600.0  # importing sglang twice takes minutes where nothing is compiled yet

    def __init__(self, backend: str, num_threads: int, *arguments: object) -> None:
        command = [sys.executable, "-m", "bench.serving.sglang_engine", backend]
        variables = {"CPATTN_NUM_THREADS": str(num_threads), **ENVIRONMENT}
        super().__init__(backend, [*command, *map(str, arguments)], num_threads, variables)

    def stop(self) -> None:
        """Stop it with the processes that sglang started, one of which would not notice."""
        started = [] if self._process is None else started_by(self._process.pid)
        super().stop()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def engines_of(model: Path, num_threads: int, page_size: int, max_tokens: int) -> list[Engine]:
    return [Engine(backend, num_threads, model, page_size, max_tokens) for backend in BACKENDS]
