# SPDX-License-Identifier: Apache-2.0
"""Base of transfer engines between processes: writes that `close` waits for, and variables."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NoReturn

from .. import _core
from .._arguments import at_least, real

_MAX_TIMEOUT = 10**6  # seconds; Mooncake reads an int
_environment_lock = threading.Lock()


class PeerEngine:
    """Base that checks writes, counts those in flight, and runs them here or on a thread.

    A subclass has `session_id`, and the methods `write`, `_write` and `close`, which waits with
    `_changed` until `_num_writes` is 0. Messages have the name of the subclass.
    """

    _name: ClassVar[str]
    _min_timeout: ClassVar[float]  # seconds
    session_id: str

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all fields below
        self._closing = False
        self._num_writes = 0  # close waits for them
        self._in_doubt: set[_core.PoolMemory] = set()  # a failed write may still read it

    def _limits(self, timeout: Any, max_blocks: Any) -> float:
        """Check and keep the blocks of a write; return its time limit in seconds."""
        seconds = real(timeout, self._name, "timeout")
        if not self._min_timeout <= seconds <= _MAX_TIMEOUT:  # refuses nan, too
            raise ValueError(
                f"{self._name}: timeout must be in [{self._min_timeout}, {_MAX_TIMEOUT}], "
                f"got {timeout}"
            )
        self.max_blocks = at_least(1, max_blocks, self._name, "max_blocks")
        return seconds

    def _write(self, session: str, blocks: _core.Blocks) -> int:
        """Return the code of a counted write."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError(f"{self._name}: {self.session_id} is closed")

    def _write_here(self, session: str, *lists: Sequence[int]) -> int:
        blocks = self._begin(session, lists)
        try:
            return self._write(session, blocks)
        finally:
            self._end()

    def write_async(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> Future[int]:
        """Start `write` on another thread; ``done()`` and ``result(timeout)`` tell its status.

        Other work can go on during a transfer; concurrent writes are not faster.
        """
        blocks = self._begin(session, (src_addrs, dst_addrs, lengths))
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # no write can be cancelled

        def write() -> None:
            try:
                code = self._write(session, blocks)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(code)
            finally:
                self._end()

        try:
            threading.Thread(target=write, name=self._name, daemon=True).start()
        except Exception:  # not Ctrl-C, which ends only the wait for a thread that has started
            self._end()
            raise
        return future

    def _begin(self, session: Any, lists: Sequence[Any]) -> _core.Blocks:
        """Check and count a write."""
        call = f"{self._name}.write"
        if not isinstance(session, str):
            raise TypeError(f"{call}: session must be a str, got {type(session).__name__}")
        if not session.isprintable():  # an engine may see only a part of it, or nothing
            raise ValueError(f"{call}: session must be printable, got {session!a}")
        blocks = _core.Blocks(call, *lists)
        with self._changed:
            self._check_open()
            self._num_writes += 1
        return blocks

    def _end(self) -> None:
        with self._changed:
            self._num_writes -= 1
            self._changed.notify_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self._name}: an engine cannot be pickled or copied: peers know its session"
        )


@contextlib.contextmanager
def variables(settings: dict[str, str]) -> Iterator[None]:
    """Set variables while an engine starts and reads them; restore the process's own afterwards."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
