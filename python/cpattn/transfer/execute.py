# SPDX-License-Identifier: Apache-2.0
"""A plan, executed over an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .._arguments import at_least, flag, part, real
from .._core import TransferPlan
from .engine import TransferEngine, TransferError, TransferStatus, checked_code

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FUNCTION = "TransferPlan.execute"
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
    check: bool = True,
) -> TransferStatus:
    """Write the blocks of a plan into the memory of a peer, batch by batch and in order.

    The first batch that fails ends it with a `TransferError`, whose ``status`` is the engine's code
    and the state of the transfer. An exception of the engine or of `progress`, or Ctrl-C, passes
    through with that state as its ``transfer_status`` (code -1) and, from Python 3.11 on, as a
    note. Either way the failed batch may be partly written.

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
        the engine's to bound: memory must not be reused under a write. 0 begins none.
    retries : int
        How often a batch with a non-zero code is written again, for the whole plan. Writing a block
        twice is writing it once, but an engine may leave the failed write in flight (Mooncake does
        after its timeout): then neither side may reuse its pages yet, even if the retry succeeds.
    progress : callable, optional
        Called as ``progress(blocks_done, bytes_done)`` after each batch.
    check : bool, optional
        False to have the code of a failed batch returned instead of raised, for engines that look
        at codes themselves.

    Returns
    -------
    TransferStatus
        The engine's code, and how far the transfer came: 0 and all blocks, unless `check` is off.

    Raises
    ------
    TransferError
        The engine answered with a code other than 0.
    TimeoutError
        Batches remained after `timeout`. It has a ``transfer_status``, too.
    """
    write = part(engine, "write", _FUNCTION, "engine")
    if max_blocks is None:
        max_blocks = getattr(engine, "max_blocks", 512)
    max_blocks = at_least(1, max_blocks, _FUNCTION, "max_blocks")
    retries = at_least(0, retries, _FUNCTION, "retries")
    check = flag(check, _FUNCTION, "check")
    deadline = math.inf if timeout is None else time.monotonic() + _seconds(timeout)
    if progress is not None and not callable(progress):
        raise TypeError(f"{_FUNCTION}: progress must be callable, got {type(progress).__name__}")
    ends = np.cumsum(self.lengths)
    bounds = _batch_bounds(ends, max_blocks)
    num_batches = len(bounds) - 1
    done = attempts = code = 0

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
                raise TimeoutError(f"{_FUNCTION}: {timeout} s have passed, the timeout")
            attempts += 1
            batch = slice(bounds[done], bounds[done + 1])
            answer = write(
                session,
                self.src_addrs[batch].tolist(),
                self.dst_addrs[batch].tolist(),
                self.lengths[batch].tolist(),
            )
            code = checked_code("write", answer)
            if code == 0:
                done += 1
                if progress:
                    progress(bounds[done], int(ends[bounds[done] - 1]))
            elif retries > 0 and time.monotonic() < deadline:
                retries -= 1
            else:
                break
    except BaseException as error:
        _annotate(error, status(-1), done)
        raise
    if code and check:
        raise TransferError(_failure(session, status(code)), status(code))
    return status(code)


def _seconds(timeout: float) -> float:
    seconds = real(timeout, _FUNCTION, "timeout")
    if not seconds >= 0:  # refuses nan, too, which would never pass
        raise ValueError(f"{_FUNCTION}: timeout must be >= 0, got {timeout}")
    return seconds


def _failure(session: str, status: TransferStatus) -> str:
    return (
        f"{_FUNCTION}: batch {status.first_failed_batch} of {status.num_batches}, counted from 0, "
        f"to session {session!r:.100} failed with code {int(status)} of the engine, after "
        f"{status.blocks_done} blocks and {status.bytes_done} bytes"
    )


def _batch_bounds(ends: NDArray[np.uint64], max_blocks: int) -> list[int]:
    """Return where batches begin, and the end, for blocks whose lengths add up to `ends`."""
    bounds = [0]
    while (begin := bounds[-1]) < len(ends):
        sent = int(ends[begin - 1]) if begin else 0
        last = min(sent + _MAX_BATCH_BYTES, 2**64 - 1)
        full = np.searchsorted(ends, np.uint64(last), side="right")
        bounds.append(max(begin + 1, min(begin + max_blocks, int(full))))
    return bounds


def _annotate(error: BaseException, status: TransferStatus, batches_done: int) -> None:
    error.transfer_status = status  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        error.add_note(
            f"after {batches_done} of {status.num_batches} batches, {status.blocks_done} blocks "
            f"and {status.bytes_done} bytes"
        )
