# SPDX-License-Identifier: Apache-2.0
"""Engines, which move the bytes of a plan."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

from .._arguments import integer


class TransferEngine(Protocol):
    """One side of transfers: memory that peers may write to, and writes into theirs.

    Any object with these members will do; `cpattn.transfer.LocalEngine`,
    `cpattn.integrations.mooncake.MooncakeEngine` and `cpattn.integrations.nixl.NixlEngine` are
    three. Codes are the engine's own, 0 is success;
    nobody translates them; ``TransferPlan.execute`` and `cpattn.transfer.register` raise
    `TransferError` for any other. An engine may raise by itself, and that passes through.

    Attributes
    ----------
    session_id : str
        Name by which peers address their writes.
    max_blocks : int
        Blocks that one write carries safely.
    """

    @property
    def session_id(self) -> str:
        """Name by which peers address their writes."""

    @property
    def max_blocks(self) -> int:
        """Blocks that one write carries safely."""

    def register(self, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Let peers write to ``sizes[i]`` bytes at ``addrs[i]``. The memory must outlive that.

        The engines of cpattn keep memory of pools until `unregister`; whose else it is, the caller
        keeps it. What is no memory of this process, they refuse with ValueError: a code would not
        say which of the ranges it is for.
        """

    def unregister(self, addrs: Sequence[int]) -> int:
        """End that for the ranges that start at `addrs`."""

    def write(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Copy blocks from memory of this process to that of the peer `session`.

        0: all bytes are there. Anything else, and any exception: some of them may be there, in any
        pattern. The same write may be made again, for it changes nothing that is right already.
        """

    def close(self) -> None:
        """Release what is registered and end. A second call does nothing."""


class TransferStatus(int):
    """The engine's return code of a transfer, 0 for success, and how far it came.

    It is an int. Of a registration, it is the code alone.

    Attributes
    ----------
    num_batches : int
        Batches the plan was cut into.
    first_failed_batch : int or None
        The batch whose code this is, counted from 0, or at which an exception ended the transfer.
        It may be partly written, in any pattern; those before it are complete, those behind it
        were not begun.
    blocks_done, bytes_done : int
        What the complete batches hold.
    attempts : int
        Writes asked of the engine, repeated ones included.

    Examples
    --------
    Nobody has registered this memory, so that the first of two writes fails:

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
    """An engine has answered with a failure code.

    Attributes
    ----------
    status : TransferStatus
        The code, and how far a transfer came.

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
    """Return the answer of an engine's method if it can be a code: False would be success."""
    if isinstance(code, bool) or not hasattr(code, "__index__"):
        raise TypeError(
            f"TransferEngine.{method} must return an integer code, 0 for success, got "
            f"{type(code).__name__}"
        )
    return operator.index(code)
