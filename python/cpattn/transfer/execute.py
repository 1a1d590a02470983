# SPDX-License-Identifier: Apache-2.0
"""A plan, executed over an engine."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .._core import TransferPlan
from .engine import TransferEngine, TransferStatus

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A batch ends here, too, so that progress, timeout and a retry never wait for many gigabytes.
_MAX_BATCH_BYTES = 256 << 20


def execute(
    self: TransferPlan,
    engine: TransferEngine,
    session: str,
    *,
    max_blocks: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> TransferStatus:
    """Write the blocks of a plan into the memory of a peer, batch by batch and in order.

    The first batch that fails ends it: its code is returned unchanged. An exception of the engine
    or of `progress`, or Ctrl-C, passes through with the state of the transfer as its
    ``transfer_status`` (code -1) and, from Python 3.11 on, as a note. Either way the failed batch
    may be partly written.

    Parameters
    ----------
    self : TransferPlan
        Sources in this process, destinations at the peer. Without blocks nothing is called.
    engine : TransferEngine
    session : str
        The peer's ``session_id``.
    max_blocks : int, optional
        Blocks of a batch at most; default ``engine.max_blocks``, else 512. Batches also end at
        256 MiB.
    timeout : float, optional
        Seconds after which no other batch is begun. The one in flight runs to its end, which is
        the engine's to bound: memory must not be reused under a write.
    retries : int
        How often a batch with a non-zero code is written again, for the whole plan. Writing a block
        twice is writing it once, but an engine may leave the failed write in flight (Mooncake does
        after its timeout): then neither side may reuse its pages yet, even if the retry succeeds.
    progress : callable, optional
        Called as ``progress(blocks_done, bytes_done)`` after each batch.

    Returns
    -------
    TransferStatus
        The engine's code, and how far the transfer came.

    Raises
    ------
    TimeoutError
        Batches remained after `timeout`. It has a ``transfer_status``, too.
    """
    if max_blocks is None:
        max_blocks = getattr(engine, "max_blocks", 512)
    max_blocks = _at_least("max_blocks", max_blocks, 1)
    retries = _at_least("retries", retries, 0)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    ends = np.cumsum(self.lengths)
    bounds = _batch_bounds(ends, max_blocks)
    num_batches = len(bounds) - 1
    done = attempts = 0

    def status(code: int) -> TransferStatus:
        return TransferStatus(
            code,
            num_batches=num_batches,
            first_failed_batch=done if code and done < num_batches else None,
            blocks_done=bounds[done],
            bytes_done=int(ends[bounds[done] - 1]) if done else 0,
            attempts=attempts,
        )

    try:
        while done < num_batches:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"TransferPlan.execute: {timeout} s have passed")
            attempts += 1
            batch = slice(bounds[done], bounds[done + 1])
            code = engine.write(
                session,
                self.src_addrs[batch].tolist(),
                self.dst_addrs[batch].tolist(),
                self.lengths[batch].tolist(),
            )
            if code == 0:
                done += 1
                if progress:
                    progress(bounds[done], int(ends[bounds[done] - 1]))
            elif retries > 0 and time.monotonic() < deadline:
                retries -= 1
            else:
                return status(code)
    except BaseException as error:
        _annotate(error, status(-1), done)
        raise
    return status(0)


def _at_least(name: str, value: int, minimum: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"TransferPlan.execute: {name} must be an integer, got {type(value).__name__}"
        )
    if value < minimum:
        raise ValueError(f"TransferPlan.execute: {name} must be >= {minimum}, got {value}")
    return operator.index(value)


def _batch_bounds(ends: NDArray[np.uint64], max_blocks: int) -> list[int]:
    """Where batches begin, and the end, for blocks whose lengths add up to `ends`."""
    bounds = [0]
    while (begin := bounds[-1]) < len(ends):
        sent = int(ends[begin - 1]) if begin else 0
        full = np.searchsorted(ends, np.uint64(sent + _MAX_BATCH_BYTES), side="right")
        bounds.append(max(begin + 1, min(begin + max_blocks, int(full))))
    return bounds


def _annotate(error: BaseException, status: TransferStatus, batches_done: int) -> None:
    error.transfer_status = status  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        error.add_note(
            f"after {batches_done} of {status.num_batches} batches, {status.blocks_done} blocks "
            f"and {status.bytes_done} bytes"
        )
