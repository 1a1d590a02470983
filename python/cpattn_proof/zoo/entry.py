# SPDX-License-Identifier: Apache-2.0
"""A bug in the zoo, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..findings import Report
from ..invariants import INVARIANTS

TOOLS = ("lint", "simulate", "conform")


@dataclass(frozen=True)
class Shipped:
    """Verdict of the same tool on the code of a release itself, run as it was published.

    Attributes
    ----------
    release : str
        Name and version, such as ``"sglang 0.5.23"``.
    ran : str
        The part of it that was run.
    says : str
        The finding, or its beginning where figures follow.
    mend : str
        The change with which it is proved.
    test : str
        The test that runs it and compares what is said, a path in the repository.
    """

    release: str
    ran: str
    says: str
    mend: str
    test: str


@dataclass(frozen=True)
class ZooEntry:
    """A bug of somebody's context-parallel code, rebuilt in a few lines of our own.

    Attributes
    ----------
    bug : str
        Repository and number, as ``"vllm-project/vllm#48003"``; one name for each entry of a tool.
    link : str
        Where it was reported.
    tool : str
        What refutes it, one of `TOOLS`.
    invariant : str
        The id that the tool names.
    story : str
        What broke, in one sentence.
    broken, mended : callables without arguments
        Run the tool on the bug, and on the same code without it; each returns a `Report`.
    shipped : Shipped, optional
        Where the code of a release was run, too.
    """

    bug: str
    link: str
    tool: str
    invariant: str
    story: str
    broken: Callable[[], Report]
    mended: Callable[[], Report]
    shipped: Shipped | None = None

    def __post_init__(self) -> None:
        if self.tool not in TOOLS:
            raise ValueError(f"ZooEntry: tool must be one of {', '.join(TOOLS)}, got {self.tool!r}")
        if self.invariant not in INVARIANTS:
            raise ValueError(
                f"ZooEntry: invariant must be one of {', '.join(INVARIANTS)}, "
                f"got {self.invariant!r}"
            )


@dataclass(frozen=True)
class Outcome:
    """Outcome of the tool on an entry.

    Attributes
    ----------
    entry : ZooEntry
        The bug.
    refuted : bool
        Whether a finding on the broken code has the entry's id.
    proved : bool
        Whether the mended code has no finding, and the invariant was among those decided.
    says : str
        The finding with the id; else the first one, or that there is none.
    seconds : float
        What both runs took.
    """

    entry: ZooEntry
    refuted: bool
    proved: bool
    says: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the tool tells the broken code from the mended one."""
        return self.refuted and self.proved

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as a mapping for JSON."""
        names = ("bug", "link", "tool", "invariant", "story")
        fields = {name: getattr(self.entry, name) for name in names}
        shipped = self.entry.shipped
        fields["shipped"] = asdict(shipped) if shipped else None
        return fields | {k: v for k, v in asdict(self).items() if k != "entry"}


def visit(entry: ZooEntry) -> Outcome:
    """Run the tool of an entry on what is broken, and on what is mended."""
    begin = time.perf_counter()
    broken, mended = entry.broken(), entry.mended()
    named = [found for found in broken.findings if found.invariant == entry.invariant]
    first = next(iter([*named, *broken.findings]), None)
    return Outcome(
        entry,
        refuted=bool(named),
        proved=mended.proved and entry.invariant in mended.checked,
        says=first.what if first else "nothing",
        seconds=time.perf_counter() - begin,
    )
