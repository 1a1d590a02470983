# SPDX-License-Identifier: Apache-2.0
"""Hosts of a group whose ranks all run here, by what each rank takes for the boot of its host."""

from contextlib import AbstractContextManager
from unittest import mock

from cpattn.distributed.transport import host

Layout = tuple[tuple[int, ...], ...]


def size_of(layout: Layout) -> int:
    return sum(map(len, layout))


def members_of(layout: Layout, rank: int) -> tuple[int, ...]:
    (members,) = (ranks for ranks in layout if rank in ranks)
    return members


class _Boot:
    """Stand-in for the file by which a rank knows its host: ranks with equal ones share memory."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read_text(self) -> str:
        return f"00000000-0000-0000-0000-{self.number:012}\n"


def on_hosts(layout: Layout, rank: int) -> AbstractContextManager[object]:
    """This rank is on the host of the layout that has it, for groups that find out meanwhile."""
    number = layout.index(members_of(layout, rank))
    return mock.patch.object(host, "_BOOT_ID", _Boot(number))
