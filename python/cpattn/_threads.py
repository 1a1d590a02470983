# SPDX-License-Identifier: Apache-2.0
"""Number of threads that calls use, for each thread that calls."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import TracebackType

from . import _core


class _Outer(threading.local):
    """Stack of previous limits, one for each thread."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []


_outer = _Outer()


class num_threads(ContextDecorator):
    """Have the calls of this thread use at most `n` threads, within a ``with`` or a function.

    It comes before `set_num_threads` and ``CPATTN_NUM_THREADS``, holds for every function that
    computes, those with names of engines included, and for this thread alone: not for threads or
    tasks that start inside. Where a call or a plan has a `num_threads` of its own, that counts.
    Results do not depend on it.

    Parameters
    ----------
    n : int
        At least 1; 1 computes on the calling thread, which suits engines with workers of their
        own. None leaves the choice to the process, also inside of another ``with``.

    Raises
    ------
    TypeError, ValueError
        When it is entered: n is no integer, or below 1.

    Examples
    --------
    >>> import numpy as np
    >>> import cpattn
    >>> with cpattn.num_threads(1):
    ...     topk = cpattn.sparse.sglang_0_5_23.fast_topk(np.float32([[0.5, 2.0, 1.0]]), [3], 2)
    >>> topk
    array([[1, 2]], dtype=int32)
    """

    def __init__(self, n: int | None) -> None:
        self._n = n

    def __enter__(self) -> None:
        _outer.numbers.append(_core.exchange_thread_default(self._n))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _core.exchange_thread_default(_outer.numbers.pop())
