# SPDX-License-Identifier: Apache-2.0
"""Process that runs an operator, which may crash, hang or write without harm to others."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from cpattn_terminal.end_with import end_with

from ..findings import NotUsable
from .forms import WrongForm
from .judgement import Result

SECONDS_TO_START = 120.0
_ROOM_OF_FAR_CASE = 14 << 30  # two untouched caches of 4 GiB, without copies
_REFUSALS = (NotImplementedError, ValueError, MemoryError)
_REFUSING_WORDS = (
    "support", "not implemented", "not compiled", "unexpected keyword", "positional argument",
    "required argument", "can't allocate", "cannot allocate", "no available kernel",
)  # fmt: skip

Operator = str | Callable[..., Any]


class Calls(Protocol):
    """Signature of an operator: how to call it, and what it answers."""

    def answer(self, fn: Any, case: Any, device: str) -> Result:
        """Call the operator on a case; its errors are left to the caller."""


class Child:
    """Runs an operator case by case; a context manager that leaves no process behind."""

    def __init__(
        self, operator: Operator, signature: Calls, device: str, time_limit: float
    ) -> None:
        self._operator, self._signature = operator, signature
        self._device, self._time_limit = device, time_limit
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Child:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, case: Any) -> Result:
        """Return the result of a case."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send(case)
            if self._pipe.poll(self._time_limit):
                result: Result = self._pipe.recv()
                return result
        except (EOFError, OSError):
            return Result(case, "crash", message=f"the process ended{self._cause()}")
        if not self._process.is_alive():  # a process that it forked keeps the pipe open
            return Result(case, "crash", message=f"the process ended{self._cause()}")
        self._end()
        return Result(case, "hang", message=f"no answer within {self._time_limit:g} seconds")

    def _start(self) -> None:
        # Modules of signatures may use a device on import; afterwards a fork is impossible.
        begins_anew = self._device != "cpu" and isinstance(self._operator, str)
        context: Any = multiprocessing.get_context("spawn" if begins_anew else "fork")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self._pipe, self._operator, self._signature, self._device)
        self._process = context.Process(
            target=_serve, args=(*arguments, os.getpid()), name="cpattn conform", daemon=True
        )
        with warnings.catch_warnings():
            # A child of a process with threads has no threads and takes none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Otherwise the child collects, and a gloo group waits for threads of the parent.
            gc.collect()
            self._process.start()
        theirs.close()
        try:
            message = self._first_words()
            if message:
                raise NotUsable(message)
        except BaseException:  # Ctrl-C during the import, too
            self._end()
            raise

    def _first_words(self) -> str:
        try:
            if self._pipe.poll(SECONDS_TO_START):
                return str(self._pipe.recv())
        except (EOFError, OSError):
            return (
                f"conform: {_name(self._operator)}: importing it ended the process{self._cause()}"
            )
        return f"conform: {_name(self._operator)}: not imported within {SECONDS_TO_START:g} seconds"

    def _cause(self) -> str:
        """Name the signal or the exit code with which the process ended."""
        self._process.join(5)
        code = self._process.exitcode
        self._end()
        if code is not None and code < 0:
            names = {int(known): known.name for known in signal.Signals}
            return f" by {names.get(-code, f'signal {-code}')}"
        return "" if code is None else f" with exit code {code}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        with suppress(ProcessLookupError):  # processes of the operator are in its group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()


def _name(operator: Operator) -> str:
    return operator if isinstance(operator, str) else getattr(operator, "__name__", repr(operator))


def load(path: str, form: str = "an operator must be named MODULE:FUNCTION") -> Any:
    """Return the object of ``module:name``; the working directory is searched, too."""
    module, colon, name = path.partition(":")
    if not module or not colon or not name:
        raise NotUsable(f"conform: {form}, got {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except NotUsable:
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise NotUsable(f"conform: {path}: {type(error).__name__}: {reason}") from None
    return found


def _serve(
    pipe: Connection, parents: Connection, operator: Operator, signature: Calls, device: str,
    parent: int,
) -> None:  # fmt: skip
    """Answer requests until the pipe closes."""
    import resource  # POSIX only

    gc.freeze()
    os.setsid()
    end_with(parent)
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process().daemon = False  # a daemon may start no processes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # it would print the stack of this tool for each of many crashes
    with suppress(OSError, ValueError):
        os.dup2(2, 1)  # the parent's standard output is for the report
    try:
        fn = load(operator) if isinstance(operator, str) else operator
        if not callable(fn):
            raise NotUsable(f"conform: {_name(operator)} must be callable, got {type(fn).__name__}")
        load("torch:set_num_threads")(1)  # threads of the parent do not exist here
    except NotUsable as error:
        pipe.send(str(error))
        return
    pipe.send("")
    own = os.getpid()
    with suppress(EOFError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            answer = _answer(fn, signature, pipe.recv(), device)
            if os.getpid() != own:  # a forked copy of this process must not answer, too
                os._exit(0)
            pipe.send(answer)


def _answer(fn: Any, signature: Calls, case: Any, device: str) -> Result:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    if case.far and device == "cpu":
        room = _address_space() + _ROOM_OF_FAR_CASE
        most = [limit for limit in limits if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([room, *most]), limits[1]))
    try:
        return signature.answer(fn, case, device)
    except WrongForm as error:
        return Result(case, "wrong-form", message=str(error))
    except (SystemExit, KeyboardInterrupt) as error:
        return Result(case, "raised", message=_said(error))
    except BaseException as error:
        said = str(error).lower()
        refuses = isinstance(error, _REFUSALS) or any(word in said for word in _REFUSING_WORDS)
        refuses = refuses and "to unpack" not in said  # a ValueError from unpacking a result
        return Result(case, "refused" if refuses else "raised", message=_said(error))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
