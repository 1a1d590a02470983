# SPDX-License-Identifier: Apache-2.0
"""A profile in the JSON format of Chrome's trace viewer, which Perfetto reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from .. import _core
from .._core import TraceScope
from .recording import Recording


def write(recording: Recording, path: str | Path) -> None:
    """Write all events as complete ("X") events in microseconds; threads have their names."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, line in enumerate(_lines(recording)):
            file.write(f",\n{line}" if i else line)
        file.write("\n]}\n")


def _lines(recording: Recording) -> Iterator[str]:
    pid = os.getpid()
    named = [("process_name", pid, "cpattn")]
    named += [("thread_name", thread.id, thread.name) for thread in recording.threads]
    for kind, tid, name in named:
        yield json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}})

    scopes = [scope.name for scope in TraceScope]
    columns = [recording.events[name].tolist() for name in recording.events.dtype.names or ()]
    for begin, end, flops, scope, dtype, thread, function in zip(*columns, strict=True):
        args = f'{{"flops": {flops}, "dtype": "{_core.dtype_name(dtype)}"}}' if flops else "{}"
        yield (
            f'{{"ph": "X", "pid": {pid}, "tid": {recording.threads[thread].id}, '
            f'"ts": {begin / 1e3:.3f}, "dur": {(end - begin) / 1e3:.3f}, "cat": "{scopes[scope]}", '
            f'"name": "{recording.functions[function] or scopes[scope]}", "args": {args}}}'
        )
