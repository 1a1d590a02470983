# SPDX-License-Identifier: Apache-2.0
"""A process that serves its parent: a line of JSON in for a command, one out for its answer.

Standard library only: it runs in the peers' environments.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, in which a child finds `bench` as this process does."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | variables


def end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answers_only() -> Callable[[Mapping[str, Any]], None]:
    """Return a function that sends answers. From now on, output of libraries is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=answers, flush=True)


def serve(owner: Any, answer: Callable[[Mapping[str, Any]], None]) -> None:
    """Answer commands, the public methods of `owner`, until standard input ends."""
    answer({"version": owner.version})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(getattr(owner, command.pop("do"))(**command))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def extra_memory(run: Callable[[], Any]) -> tuple[int, Any]:
    """The peak of memory that a call adds, in bytes, and its result."""
    LIBC.malloc_trim(0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    result = run()
    return _memory("VmHWM") - before, result


def _memory(field: str) -> int:
    """Bytes of memory, from this process's status."""
    found = re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
