# SPDX-License-Identifier: Apache-2.0
"""Execution of a plan over an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._arguments import at_least, flag, part, real
from .._core import TransferPlan
from .digests import KVMismatch
from .engine import TransferEngine, TransferError, TransferStatus, checked_code

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .layout import KVLayout

_FUNCTION = "TransferPlan.execute"
# A batch also ends here, so progress, timeout and retries never wait for many gigabytes.
_MAX_BATCH_BYTES = 256 << 20
_MAX_NAMED = 64  # blocks with differences that the message describes


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
    verify: bool = False,
) -> TransferStatus:
    """Write the blocks of a plan into the memory of a peer, batch by batch and in order.

    The first batch that fails ends the call with a `TransferError`, whose ``status`` has the
    engine's code and the progress. An exception of the engine or of `progress`, or Ctrl-C, passes
    through with that progress as its ``transfer_status`` (code -1) and, from Python 3.11 on, as a
    note. In all cases the failed batch may be partly written.

    Parameters
    ----------
    self : TransferPlan
        Sources in this process, destinations at the peer. An empty plan makes no call.
    engine : TransferEngine
    session : str
        The peer's ``session_id``.
    max_blocks : int, optional
        Most blocks of a batch; default ``engine.max_blocks``, else 512. Batches also end at 256
        MiB.
    timeout : float, optional
        Seconds after which no further batch begins. The batch in flight runs to its end, which the
        engine must bound: memory must not be reused during a write. 0 begins no batch.
    retries : int
        Number of repeated writes of batches with a non-zero code, for the whole plan. Repeating a
        write is safe, but an engine may leave the failed write in flight (Mooncake does after its
        timeout): neither side may then reuse its pages yet, even if the retry succeeds.
    progress : callable, optional
        Called as ``progress(blocks_done, bytes_done)`` after each batch.
    check : bool, optional
        Whether to raise the code of a failed batch. False returns it, for callers that check codes.
    verify : bool, optional
        Whether to compare every byte with its source in the end. This needs an engine with
        ``differing``, such as `LocalEngine`; over a network, both sides can compare digests, see
        `cpattn.transfer.digest`. Both memories must not change until the call returns.

    Returns
    -------
    TransferStatus
        Engine's code and progress: 0 and all blocks, unless `check` is off.

    Raises
    ------
    TransferError
        If the engine returns a code other than 0.
    KVMismatch
        If `verify` finds other bytes. The message names buffers and pages for plans of
        `plan_kv_transfer` and `plan_kv_links`, and blocks and addresses for other plans.
    TimeoutError
        If batches remain after `timeout`. It has a ``transfer_status``, too.
    """
    write = part(engine, "write", _FUNCTION, "engine")
    if max_blocks is None:
        max_blocks = getattr(engine, "max_blocks", 512)
    max_blocks = at_least(1, max_blocks, _FUNCTION, "max_blocks")
    retries = at_least(0, retries, _FUNCTION, "retries")
    check = flag(check, _FUNCTION, "check")
    differing = None
    if flag(verify, _FUNCTION, "verify"):
        differing = part(engine, "differing", _FUNCTION, "engine, for verify,")
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
        failed = status(code)
        raise TransferError(
            f"{_FUNCTION}: batch {done} of {num_batches}, counted from 0, to session "
            f"{session!r:.100} failed with code {code} of the engine, after {failed.blocks_done} "
            f"blocks and {failed.bytes_done} bytes",
            failed,
        )
    if differing is not None and not code:
        blocks = differing(session, self.src_addrs, self.dst_addrs, self.lengths)
        if blocks:
            raise _mismatch(self, blocks)
    return status(code)


def _seconds(timeout: float) -> float:
    seconds = real(timeout, _FUNCTION, "timeout")
    if not seconds >= 0:  # also refuses nan, which would never pass
        raise ValueError(f"{_FUNCTION}: timeout must be >= 0, got {timeout}")
    return seconds


def _batch_bounds(ends: NDArray[np.uint64], max_blocks: int) -> list[int]:
    """Return the begins of batches, and the end, for blocks whose lengths add up to `ends`."""
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


def _mismatch(plan: TransferPlan, blocks: Sequence[int]) -> KVMismatch:
    """Describe the blocks that differ, as far as the plan knows their buffers."""
    found: dict[str, None] = {}  # an ordered set
    for block in blocks[:_MAX_NAMED]:
        src, dst = int(plan.src_addrs[block]), int(plan.dst_addrs[block])
        what = f"block {block}, {plan.lengths[block]} bytes from {src:#x} to {dst:#x}"
        if layouts := getattr(plan, "layouts", None):
            source, target = layouts
            buffer, page = _place(source, src)
            what = f"{buffer}, page {page} here and {_place(target, dst)[1]} there"
        found[what] = None
    names = tuple(found)
    rest = "; and more" * (len(names) > 4 or len(blocks) > _MAX_NAMED)
    return KVMismatch(
        f"{_FUNCTION}: {len(blocks)} of {len(plan)} blocks have other bytes than their sources: "
        f"{'; '.join(names[:4])}{rest}",
        names,
    )


def _place(layout: KVLayout, addr: int) -> tuple[str, int]:
    """Return the name of the buffer that contains an address, and the page."""
    for entry in layout.entries:
        page, byte = divmod(addr - entry.addr, entry.page_stride or entry.item_len or 1)
        if 0 <= addr - entry.addr < entry.nbytes and byte < entry.item_len:
            return f"{entry.kind} of {'draft ' * entry.is_draft}layer {entry.layer_id}", page
    raise AssertionError(f"a plan of these layouts has address {addr}")
