# SPDX-License-Identifier: Apache-2.0
"""Recorder that listens to calls of the library and writes them in its own thread."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

from .. import _core
from ..profiling import calls
from .lines import SCHEMA, to_line
from .told import TOLD, Fields, written

_PAUSE = 0.2  # seconds between two looks at the queue of calls
_MOST_NAMES = 1000  # file names that one process tries
_MAX_PLANS = 256  # plans that runs can refer to; an engine makes a few per step
_RUN = b'{"call":"run_attention","at":%.7f,"seconds":%.7f,'

_by_environment: dict[str, int] = {}  # the process that records until it ends


@contextmanager
def capture(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Record plans and exchanges of the library in this process.

    The file has lengths, page tables, slots, sizes, addresses of transfers, the order of calls and
    their times, but no tokens or elements of tensors. A thread writes it while calls go on.

    Parameters
    ----------
    path : path
        The file, which must not exist. Each process needs its own: ``{rank}`` in the name stands
        for the rank in `torch.distributed`, or else the environment's RANK, or 0; ``{pid}`` stands
        for the process id. A forked child records nothing.

    Yields
    ------
    Path
        Name of the file.

    Raises
    ------
    FileExistsError
        If the file exists.
    OSError
        If the file cannot be written; raised at the end if writing failed on the way.

    Examples
    --------
    >>> import cpattn, tempfile
    >>> from cpattn.captures import capture
    >>> from cpattn_proof import read_captures
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with capture(f"{folder}/run.cpcap") as path:
    ...         plan = cpattn.build_cp_metadata([10, 14], [15, 14], cp_rank=1, cp_size=2)
    ...     (batch,) = read_captures([path]).batches
    >>> batch.extend_lens, batch.seq_lens
    ([10, 14], [15, 14])
    """
    name = os.fspath(path)
    for placeholder, number in (("{rank}", _rank()), ("{pid}", os.getpid())):
        name = name.replace(placeholder, str(number))
    recorder = _Recorder(Path(name))
    calls.listeners.append(recorder.listen)
    try:
        yield recorder.path
    finally:
        calls.listeners.remove(recorder.listen)
        recorder.close()


def capture_by_environment() -> None:
    """Record this process until it ends, if CPATTN_CAPTURE names a file.

    Plug-ins call this, as engines compute in their own processes. A name without ``{pid}`` gets the
    process id. If that file exists, because containers reuse process ids, the name also gets a
    count from 1. If the file cannot be written, the call warns and records nothing, and the engine
    goes on. A killed process loses its last moments.
    """
    path = os.environ.get("CPATTN_CAPTURE")
    if not path or _by_environment.get("pid") == os.getpid():
        return
    _by_environment["pid"] = os.getpid()
    path = path if "{pid}" in path else f"{path}.{{pid}}"
    for attempt in range(_MOST_NAMES):
        running = capture(f"{path}.{attempt}" if attempt else path)
        try:
            running.__enter__()
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:  # or an invalid RANK
            warnings.warn(f"CPATTN_CAPTURE: nothing is recorded: {error}", stacklevel=2)
        else:
            atexit.register(running.__exit__, None, None, None)
        return
    warnings.warn(
        f"CPATTN_CAPTURE: nothing is recorded: {_MOST_NAMES} files of this name are there",
        stacklevel=2,
    )


class _Recorder:
    """Queue of calls that its thread writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("xb")
        self._pid = os.getpid()
        self._begin = time.perf_counter()
        self._told: deque[tuple[str, float, float, Fields]] = deque()
        self._plans: OrderedDict[int, tuple[int, Any]] = OrderedDict()  # by id: number and plan
        self._num_plans = 0
        self._last_run: tuple[Any, bytes] = None, b""
        self._error: Exception | None = None
        self._has_header = False
        self._ending = Event()
        self._thread = Thread(target=self._write_on, name="cpattn capture", daemon=True)
        self._thread.start()

    def listen(self, call: calls.Call) -> None:
        keep = TOLD.get(call.name)
        if keep is None or os.getpid() != self._pid or self._error:
            return
        try:
            if (fields := keep(call)) is not None:
                self._told.append((call.name, call.begin, call.end, fields))
        except Exception as error:  # an error of the recorder; the engine's call succeeded
            self._error = error

    def close(self) -> None:
        """Write the remaining calls, or raise the error that kept a call from being written."""
        if os.getpid() != self._pid:
            return
        self._ending.set()
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._error

    def _write_on(self) -> None:
        try:
            while not self._ending.wait(_PAUSE):
                self._write()
            self._write()
            if not self._has_header:
                self._write_header()
        except Exception as error:
            self._error = error
            self._told.clear()

    def _write(self) -> None:
        if self._told and not self._has_header:
            self._write_header()
        while self._told:
            name, begin, end, fields = self._told.popleft()
            if name == "run_attention":  # most frequent: one per layer
                run = self._run(**fields)
                self._file.write(_RUN % (begin - self._begin, end - begin) + run)
                continue
            times = {"at": round(begin - self._begin, 7), "seconds": round(end - begin, 7)}
            self._file.write(to_line({"call": name, **times, **self._numbered(name, fields)}))
        self._file.flush()

    def _write_header(self) -> None:
        """Write the header at the first call, once this process knows its rank."""
        self._file.write(to_line(_header()))
        self._has_header = True

    def _numbered(self, name: str, fields: Fields) -> Fields:
        """Return the fields to write; plans that are run later get numbers."""
        if name == "plan_attention":
            plan = fields["plan"]
            self._plans[id(plan)] = self._num_plans, plan
            self._num_plans += 1
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
            return {"number": self._num_plans - 1, **written(fields)}
        return written(fields)

    def _run(self, plan: Any, shape: Sequence[int], dtype: Any) -> bytes:
        """Return the line of a run without its times; all layers share the line of the first."""
        number, _ = self._plans.get(id(plan), (None, None))
        key = number, tuple(shape), dtype
        if key != self._last_run[0]:
            name = str(dtype).removeprefix("torch.")
            line = to_line({"plan": number, "shape": list(shape), "dtype": name})
            self._last_run = key, line[1:]
        return self._last_run[1]


def _rank() -> int:
    if "torch.distributed" in sys.modules:
        from torch import distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    if not (rank.isascii() and rank.isdigit()):
        raise ValueError(
            f"capture: RANK in the environment must be a number >= 0, got {rank!r:.40}"
        )
    return int(rank)


def _header() -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "cpattn": _core.__version__,
        "isa": _core.active_isa(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": _rank(),
    }
