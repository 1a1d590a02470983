# SPDX-License-Identifier: Apache-2.0
"""A process to send to: a decode server with nothing but memory, registered with the engine.

``python -m bench.transfer.receiver FILE`` is that process: it shares the file's memory with its
parent, sends its address, and ends with its standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

import cpattn
from bench.harness.contender import Failed
from bench.harness.worker import child_environment

MARK = "receiver: "


class Receiver(NamedTuple):
    """The sender's view, including its own engine."""

    engine: Any
    session: str
    address: int  # of the memory in the other process
    memory: np.ndarray  # the same memory here


_started = contextlib.ExitStack()
atexit.register(_started.close)


@functools.cache
def receiver(size: int) -> Receiver:
    """Start the receiver once. Failed without an engine."""
    from cpattn.integrations.mooncake import MooncakeEngine

    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # the engine's log would tear up the tables
    try:
        engine = MooncakeEngine()
    except ImportError as error:
        raise Failed("not installed", str(error)) from error
    file = tempfile.NamedTemporaryFile(dir=_folder(size))  # noqa: SIM115
    file.truncate(size)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.transfer.receiver", file.name],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = next((line for line in process.stdout if line.startswith(MARK)), "")
    if not said:
        raise Failed("crashed", f"the receiver ended with exit code {process.wait()}")
    session, address = json.loads(said.removeprefix(MARK))
    memory = np.memmap(file.name, np.uint8, "r+")
    _started.callback(_stop, engine, process, file)
    return Receiver(engine, session, address, memory)


def _folder(size: int) -> Path | None:
    """A folder with enough room, in memory if possible: a page without room there is SIGBUS."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and shutil.disk_usage(shared).free >= 2 * size
    return shared if fits else None


def end() -> None:
    """End the running receiver, if any; the next call of `receiver` starts another."""
    _started.close()
    receiver.cache_clear()


def _stop(engine: Any, process: subprocess.Popen[str], file: IO[bytes]) -> None:
    """End both engines before the memory that they may write to."""
    engine.close()
    process.communicate()
    file.close()


def serve(path: str) -> None:
    from cpattn.integrations.mooncake import MooncakeEngine

    memory = np.memmap(path, np.uint8, "r+")
    with MooncakeEngine() as engine:
        cpattn.transfer.register(engine, memory)
        print(MARK + json.dumps([engine.session_id, memory.ctypes.data]), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1])
