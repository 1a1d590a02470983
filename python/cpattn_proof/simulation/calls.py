# SPDX-License-Identifier: Apache-2.0
"""Calls of a rank to other ranks: the tensors that it gives to each and takes from each."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

#: Files of this library.
PACKAGE = str(Path(__file__).parents[2])
_HERE = str(Path(__file__).parent)
# Files outside of the program; a call may pass through their lines.
_NOT_PROGRAMS = (
    _HERE,
    str(Path(torch.__file__).parent),
    "<frozen",
    *(str(sys.modules[name].__file__) for name in ("contextlib", "functools", "typing_extensions")),
)

Blocks = dict[int, list[torch.Tensor]]


class Site(NamedTuple):
    """Line of the program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


_OF_THREAD = threading.local()


@contextlib.contextmanager
def at_site(site: Site) -> Iterator[None]:
    """Attribute this thread's calls in the block to a recorded line, whose code does not run."""
    _OF_THREAD.site = site
    try:
        yield
    finally:
        del _OF_THREAD.site


def is_program(file: str) -> bool:
    """Tell whether a file belongs neither to torch nor to this package."""
    return not file.startswith(_NOT_PROGRAMS)


def site_of_caller() -> Site:
    """Return the innermost line outside of torch and this package, or the line of `at_site`."""
    site: Site | None = getattr(_OF_THREAD, "site", None)
    if site is not None:
        return site
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_program(frame.f_code.co_filename):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@dataclass(frozen=True)
class Group:
    """Ranks of the world that communicate, with torch's name of the group."""

    name: str
    ranks: tuple[int, ...]
    generation: int = 0  # counts its rank's default groups; each restarts torch's names

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        in_a_row = len(self.ranks) > 2 and self.ranks == tuple(range(first, last + 1))
        ranks = f"{first}-{last}" if in_a_row else ", ".join(map(str, self.ranks))
        return f"group {self.name} of ranks {ranks}"


@dataclass(eq=False)
class Call:
    """Call of a rank.

    Attributes
    ----------
    kind : str
        Name of the function in `torch.distributed`.
    group, rank : Group, int
        Group, and rank within the group.
    site : Site
        Line of the program.
    terms : dict
        Values that must be equal on all ranks, such as the root or the operator.
    gives, takes : dict
        Tensors by the rank of the group that receives or sends them.
    reduces : list of tensors
        Instead of `takes`: filled with the reduction of the tensors that all ranks give.
    peer, tag : int
        Rank and tag of point-to-point calls; -1 to receive from any rank.
    """

    kind: str
    group: Group
    rank: int
    site: Site
    terms: dict[str, object] = field(default_factory=dict)
    gives: Blocks = field(default_factory=dict)
    takes: Blocks = field(default_factory=dict)
    reduces: list[torch.Tensor] = field(default_factory=list)
    op: object = None
    peer: int | None = None
    tag: int = 0
    number: int = 0  # place among this rank's calls
    given: Blocks = field(default_factory=dict)  # copy of `gives` at the call
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # inputs and copies
    partners: dict[int, Call] = field(default_factory=dict)  # all of a collective, or the other end
    sums: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # shared by partners
    source: int = -1  # sender of a received message
    written_by: Call | None = None  # another call of the rank that fills its memory meanwhile
    complete: bool = False
    delivered: bool = False
    digest: bytes = b""  # digest of the given tensors
    sent_bytes: int = 0
    begin: float = 0.0  # seconds of the rank's own time
    end: float = 0.0

    @property
    def world_rank(self) -> int:
        return self.group.ranks[self.rank]

    @property
    def is_message(self) -> bool:
        """Whether the call is between two ranks."""
        return self.peer is not None

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        """All tensors that the call fills."""
        return [*(tensor for block in self.takes.values() for tensor in block), *self.reduces]

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """All tensors that the call reads, each once."""
        tensors = {id(tensor): tensor for block in self.gives.values() for tensor in block}
        return list(tensors.values())

    def let_go(self) -> None:
        """Drop tensors that no rank needs any more, since long programs make many calls."""
        if self.partners and all(other.delivered for other in self.partners.values()):
            for call in (self, *self.partners.values()):
                call._forget()

    def _forget(self) -> None:
        self.gives = {rank: [] for rank in self.gives}
        self.takes = {rank: [] for rank in self.takes}
        self.reduces, self.given, self.kept, self.sums = [], {}, [], {}
        self.partners, self.written_by = {}, None
        self.forget_lists()

    def forget_lists(self) -> None:
        """Drop lists made from the tensors, after the tensors have changed."""
        for name in ("inputs", "outputs"):
            self.__dict__.pop(name, None)

    @property
    def is_uniform(self) -> bool:
        """Whether the call gives and takes the same for all ranks, so it fits all calls or none."""
        return self.kind.startswith("all_reduce")

    def expected_from(self, source: int) -> list[torch.Tensor]:
        """Return the tensors expected from a rank of the group, reduced or not."""
        return self.reduces or self.takes.get(source, [])

    def __str__(self) -> str:
        if not self.is_message:
            return f"{self.kind} on {self.group}"
        if self.peer == -1:
            whom = "from any rank"
        else:
            assert self.peer is not None
            way = "to" if self.gives else "from"
            whom = f"{way} rank {self.group.ranks[self.peer]}"
        return f"{self.kind} {whom}, tag {self.tag}"


def sizes_text(tensors: list[torch.Tensor]) -> str:
    """Describe sizes and dtypes for people."""
    return (
        ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
        or "nothing"
    )
