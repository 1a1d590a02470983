# SPDX-License-Identifier: Apache-2.0
"""Bug in the zoo, and the result of the tools on it."""

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
    """Verdict of the same tool on the published code of a release.

    Attributes
    ----------
    release : str
        Name and version, such as ``"sglang 0.5.23"``.
    ran : str
        Part of the release that was run.
    says : str
        Finding, or its beginning if figures follow.
    mend : str
        Change that makes the tool prove it.
    test : str
        Test that runs it and compares the finding, a path in the repository.
    """

    release: str
    ran: str
    says: str
    mend: str
    test: str


@dataclass(frozen=True)
class ZooEntry:
    """Bug of context-parallel code of others, rebuilt in a few lines of our own.

    Attributes
    ----------
    bug : str
        Repository and number, as ``"vllm-project/vllm#48003"``; one name for each entry of a tool.
    link : str
        Address of the report.
    tool : str
        Tool that refutes it, one of `TOOLS`.
    invariant : str
        Id that the tool names.
    story : str
        One sentence about the bug.
    broken, mended : callables without arguments
        Run the tool on the bug, and on the same code without it; each returns a `Report`.
    shipped : Shipped, optional
        Verdict on the code of a release, if it was run, too.
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
    """Result of the tool on an entry.

    Attributes
    ----------
    entry : ZooEntry
        The bug.
    refuted : bool
        Whether a finding on the broken code has the entry's id.
    proved : bool
        Whether the mended code has no finding and the invariant was decided.
    says : str
        Finding with the id; else the first finding, or a note that there is none.
    seconds : float
        Time of both runs.
    """

    entry: ZooEntry
    refuted: bool
    proved: bool
    says: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the tool distinguishes the broken code from the mended code."""
        return self.refuted and self.proved

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as a mapping for JSON."""
        names = ("bug", "link", "tool", "invariant", "story")
        fields = {name: getattr(self.entry, name) for name in names}
        shipped = self.entry.shipped
        fields["shipped"] = asdict(shipped) if shipped else None
        return fields | {k: v for k, v in asdict(self).items() if k != "entry"}


def visit(entry: ZooEntry) -> Outcome:
    """Run the tool of an entry on the broken and on the mended code."""
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
