# SPDX-License-Identifier: Apache-2.0
"""Which ranks say that they are on which host."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from cpattn.distributed.transport import host

Layout = tuple[tuple[int, ...], ...]


class _Boot:
    """Like the file by which a rank knows its host: ranks with the same one share memory."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read_text(self) -> str:
        return f"00000000-0000-0000-0000-{self.number:012}\n"


def on_hosts(layout: Layout, rank: int) -> AbstractContextManager[object]:
    """This rank is on the host of the layout that has it, for groups that find out meanwhile."""
    (number,) = (i for i, ranks in enumerate(layout) if rank in ranks)
    return mock.patch.object(host, "_BOOT_ID", _Boot(number))
