# SPDX-License-Identifier: Apache-2.0
"""Calls into engines that may hang, with a limit on the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any


class CallHangs(RuntimeError):
    """A call has not returned within its limit, or a previous call for its key still hangs."""


class BoundedCalls:
    """Calls on other threads, each for a key such as a session.

    No call into foreign code can be ended. A call that exceeds its limit is given up: its result is
    dropped, and until it returns no other call for its key begins. The threads are daemons, so the
    process can end meanwhile; free threads take the next calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards all fields below
        self._deadlines: dict[Future[Any], float] = {}  # of running calls
        self._hanging: dict[str, Future[Any]] = {}
        self._free: list[SimpleQueue[Callable[[], None] | None]] = []  # of threads
        self._closed = False

    def run(self, key: str, seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return or raise the outcome of the call; CallHangs if it takes more than `seconds`."""
        seconds = min(seconds, threading.TIMEOUT_MAX)  # the longest wait of a thread
        future: Future[Any] = Future()

        def work() -> None:
            try:
                result = call(*arguments)
            except BaseException as error:
                self._forget(future)
                future.set_exception(error)
            else:
                self._forget(future)
                future.set_result(result)

        with self._lock:
            hanging = self._hanging.get(key)
            if hanging is not None and not hanging.done():
                raise CallHangs(f"{self._name}: an earlier call for {key} still hangs")
            self._hanging.pop(key, None)
            thread = self._free.pop() if self._free else self._start()
            self._deadlines[future] = time.monotonic() + seconds
        thread.put(work)
        try:
            return future.result(seconds)  # Ctrl-C ends this wait
        except FutureTimeoutError:
            with self._lock:
                if not future.done():
                    self._hanging[key] = future
                    raise CallHangs(f"{self._name}: no answer for {key} in {seconds} s") from None
            return future.result()

    def close(self) -> None:
        """Wait until every call has returned or outlasted its limit, and end the free threads."""
        with self._lock:
            deadlines = dict(self._deadlines)
        for future, deadline in deadlines.items():
            wait([future], max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._closed = True
            for thread in self._free:
                thread.put(None)
            self._free.clear()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._deadlines.pop(future, None)

    def _start(self) -> SimpleQueue[Callable[[], None] | None]:
        """Run the works put into its queue; the body of a thread."""
        queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

        def serve() -> None:
            while (work := queue.get()) is not None:
                work()
                del work  # and its arguments
                with self._lock:
                    if self._closed:
                        return
                    self._free.append(queue)

        threading.Thread(target=serve, name=self._name, daemon=True).start()
        return queue
