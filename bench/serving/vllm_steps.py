# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM's engine, with its own attention and with cpattn, alone or beside other work."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from bench.serving.steps import STEPS, Case

SAME = 0.97  # times as fast: as fast, by what two runs of one engine differ
CASES: tuple[Case, ...] = (
    Case(1, 128, bar=SAME),
    Case(1, 512, bar=SAME),
    Case(1, 1024, bar=SAME),
    Case(1, 4096, bar=1.3),
    Case(1, 4096, STEPS, bar=SAME),
    Case(8, 200, STEPS, bar=SAME),
    Case(8, 1024, STEPS, bar=SAME),
)
MLA_CASES: tuple[Case, ...] = (
    Case(1, 512, bar=1.0),
    Case(1, 2048, bar=1.0),
    Case(1, 2048, STEPS, bar=1.0),
    Case(8, 1024, STEPS, bar=1.0),
)
QUICK_CASES: tuple[Case, ...] = (Case(1, 96), Case(2, 100, 4))


@contextlib.contextmanager
def busy_neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps a core busy, like other work on the machine."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process
        finally:
            process.kill()
