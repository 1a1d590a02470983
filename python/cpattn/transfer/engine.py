# SPDX-License-Identifier: Apache-2.0
"""Engines that move the bytes of a plan."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

from .._arguments import integer


class TransferEngine(Protocol):
    """Interface of one side of transfers: memory that peers may write to, and writes to peers.

    Any object with these members qualifies, such as `cpattn.transfer.LocalEngine`,
    `cpattn.integrations.mooncake.MooncakeEngine` and `cpattn.integrations.nixl.NixlEngine`. Codes
    are the engine's own and are not translated; 0 is success. ``TransferPlan.execute`` and
    `cpattn.transfer.register` raise `TransferError` for any other code. Exceptions of an engine
    pass through.
    """

    @property
    def session_id(self) -> str:
        """Name by which peers address their writes."""

    @property
    def max_blocks(self) -> int:
        """Most blocks that one write safely carries."""

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let peers write to ``sizes[i]`` bytes at ``addrs[i]``. The memory must outlive that.

        The engines of cpattn keep memory of pools until `unregister`; the caller must keep any
        other memory. They raise ValueError for memory that this process does not have, as a code
        would not tell which range is meant.
        """

    def unregister(self, addrs: Sequence[int]) -> int:
        """Take the ranges that start at `addrs` from peers again."""

    def write(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Copy blocks from memory of this process to that of the peer `session`.

        With 0, all bytes are there. With any other code or an exception, some bytes may be there,
        in any pattern. Repeating the write is safe: it does not change correct bytes.
        """

    def close(self) -> None:
        """Release registered memory and end. A second call does nothing."""


class TransferStatus(int):
    """Return code of an engine for a transfer, 0 for success, with the progress.

    The status is an int. For a registration, it is only the code.

    Attributes
    ----------
    num_batches : int
        Number of batches of the plan.
    first_failed_batch : int or None
        Index of the batch that returned the code or ended with an exception. It may be partly
        written, in any pattern; earlier batches are complete, and later ones were not begun.
    blocks_done, bytes_done : int
        Blocks and bytes of the complete batches.
    attempts : int
        Number of writes given to the engine, repeated ones included.

    Examples
    --------
    The destination is not registered, so the first of two writes fails:

    >>> from cpattn.transfer import LocalEngine, TransferPlan
    >>> plan = TransferPlan([4096, 8192], [16384, 20480], [512, 512])
    >>> with LocalEngine() as engine:
    ...     plan.execute(engine, engine.session_id, max_blocks=1, check=False)
    TransferStatus(-1, num_batches=2, first_failed_batch=0, blocks_done=0, bytes_done=0, attempts=1)
    """

    num_batches: int
    first_failed_batch: int | None
    blocks_done: int
    bytes_done: int
    attempts: int

    def __new__(
        cls,
        code: int = 0,
        *,
        num_batches: int = 0,
        first_failed_batch: int | None = None,
        blocks_done: int = 0,
        bytes_done: int = 0,
        attempts: int = 0,
    ) -> TransferStatus:
        self = super().__new__(cls, integer(code, "TransferStatus", "code"))
        self.num_batches = num_batches
        self.first_failed_batch = first_failed_batch
        self.blocks_done = blocks_done
        self.bytes_done = bytes_done
        self.attempts = attempts
        return self

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"TransferStatus({int(self)}, {fields})"


class TransferError(RuntimeError):
    """An engine has returned a failure code.

    Attributes
    ----------
    status : TransferStatus
        Code, and progress of the transfer.

    Examples
    --------
    >>> import cpattn
    >>> plan = cpattn.transfer.TransferPlan([4096], [8192], [512])
    >>> with cpattn.transfer.LocalEngine() as engine:
    ...     try:
    ...         plan.execute(engine, engine.session_id)
    ...     except cpattn.transfer.TransferError as error:
    ...         print(int(error.status))  # nobody has registered this memory
    -1
    """

    def __init__(self, message: str, status: TransferStatus) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status), vars(self)


def checked_code(method: str, code: Any) -> int:
    """Return the result of an engine's method if it can be a code: False would be success."""
    if isinstance(code, bool) or not hasattr(code, "__index__"):
        raise TypeError(
            f"TransferEngine.{method} must return an integer code, 0 for success, got "
            f"{type(code).__name__}"
        )
    return operator.index(code)
