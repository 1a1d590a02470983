# SPDX-License-Identifier: Apache-2.0
"""Hosts of a group whose ranks all run here: each rank reads a chosen boot id as its host's."""

from contextlib import AbstractContextManager
from types import SimpleNamespace
from unittest import mock

from cpattn.distributed.transport import host

Layout = tuple[tuple[int, ...], ...]


def size_of(layout: Layout) -> int:
    return sum(map(len, layout))


def members_of(layout: Layout, rank: int) -> tuple[int, ...]:
    (members,) = (ranks for ranks in layout if rank in ranks)
    return members


def on_hosts(layout: Layout, rank: int) -> AbstractContextManager[object]:
    """Put this rank on its host of the layout, for groups that look for hosts meanwhile."""
    number = layout.index(members_of(layout, rank))
    # Stand-in for the file by which a rank knows its host: ranks with equal ids share memory.
    boot = SimpleNamespace(read_text=lambda: f"00000000-0000-0000-0000-{number:012}\n")
    return mock.patch.object(host, "_BOOT_ID", boot)
