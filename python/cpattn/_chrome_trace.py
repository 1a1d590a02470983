# SPDX-License-Identifier: Apache-2.0
"""A profile in the JSON format of Chrome's trace viewer, which Perfetto reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import _core
from ._core import TraceScope

if TYPE_CHECKING:
    from .profiling import Profile


def write(profile: Profile, path: str | Path) -> None:
    """Write all events as complete ("X") events in microseconds; threads have their names."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, line in enumerate(_lines(profile)):
            file.write(f",\n{line}" if i else line)
        file.write("\n]}\n")


def _lines(profile: Profile) -> Iterator[str]:
    pid = os.getpid()
    named = [("process_name", pid, "cpattn")]
    named += [("thread_name", thread.id, thread.name) for thread in profile.threads]
    for kind, tid, name in named:
        yield json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}})

    scopes = [scope.name for scope in TraceScope]
    columns = [profile.events[name].tolist() for name in profile.events.dtype.names or ()]
    for begin, end, flops, scope, dtype, thread, function in zip(*columns, strict=True):
        args = f'{{"flops": {flops}, "dtype": "{_core.dtype_name(dtype)}"}}' if flops else "{}"
        yield (
            f'{{"ph": "X", "pid": {pid}, "tid": {profile.threads[thread].id}, '
            f'"ts": {begin / 1e3:.3f}, "dur": {(end - begin) / 1e3:.3f}, "cat": "{scopes[scope]}", '
            f'"name": "{profile.functions[function] or scopes[scope]}", "args": {args}}}'
        )
