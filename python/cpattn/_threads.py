# SPDX-License-Identifier: Apache-2.0
"""Number of threads that calls use, set for each calling thread."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import TracebackType

from . import _core


class _Outer(threading.local):
    """Stack of previous limits, one per thread."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []


_outer = _Outer()


class num_threads(ContextDecorator):
    """Limit calls of this thread to `n` threads, in a ``with`` block or a decorated function.

    The limit overrides `set_num_threads` and ``CPATTN_NUM_THREADS`` and holds for every function
    that computes, including functions under names of engines. It does not hold for threads or tasks
    that start inside. The `num_threads` of a call or plan overrides it. Results do not depend on
    it.

    Parameters
    ----------
    n : int
        At least 1; 1 computes on the calling thread only, which suits engines with their own
        workers. None restores the default of the process, also inside another ``with``.

    Raises
    ------
    TypeError, ValueError
        If `n` is no integer or below 1; raised on entry.

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
