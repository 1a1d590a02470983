# SPDX-License-Identifier: Apache-2.0
"""Findings and reports of the tools of this package, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from textwrap import indent
from typing import Any

from .invariants import INVARIANTS

PROVED, REFUTED, NOT_USABLE = 0, 1, 2  # exit codes

SCHEMA = "cpattn-report/1"


class NotUsable(ValueError):
    """Input of a tool that cannot be judged, with the reason. Commands exit with 2."""


@dataclass(frozen=True)
class Finding:
    """Broken invariant.

    Attributes
    ----------
    invariant : str
        Id of the invariant, one of `INVARIANTS`.
    what : str
        The fault, in one line with the numbers that disagree.
    where : str
        First token, page, byte or call concerned.
    ranks : tuple of int
        Ranks concerned.
    picture : str
        Blocks, rows or calls around it, as text; may be empty.
    advice : str
        Advice for this fault; empty to use the invariant's own.
    kind : str
        Name of this specific fault if the tool has one, such as `lse-base-2`; may be empty.
    details : mapping
        Numbers for programs; JSON.

    Examples
    --------
    >>> found = Finding("OWN", "2 ranks write slot 3", where="slot 3", ranks=(0, 1))
    >>> print("\\n".join(found.text().splitlines()[:2]))
    OWN: 2 ranks write slot 3
      --> ranks 0, 1: slot 3
    """

    invariant: str
    what: str
    where: str = ""
    ranks: tuple[int, ...] = ()
    picture: str = ""
    advice: str = ""
    kind: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.invariant not in INVARIANTS:
            raise ValueError(
                f"Finding: invariant must be one of {', '.join(INVARIANTS)}, got {self.invariant!r}"
            )

    def text(self) -> str:
        """Return the finding as several lines, like a compiler error."""
        invariant = INVARIANTS[self.invariant]
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        where = ": ".join(filter(None, (ranks if self.ranks else "", self.where)))
        lines = [f"{self.invariant}{f' {self.kind}' if self.kind else ''}: {self.what}"]
        if where:
            lines.append(f"  --> {where}")
        if self.picture:
            lines += [
                "   |",
                indent(self.picture.rstrip("\n"), "   |  ", lambda line: True),
                "   |",
            ]
        lines += [
            f"   = rule: {invariant.rule}",
            f"   = why:  {invariant.matters}",
            f"   = do:   {self.advice or invariant.advice}",
            f"   = see:  {invariant.page}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Result of a tool.

    Attributes
    ----------
    tool : str
        ``"lint"``, ``"simulate"``, ``"conform"`` or ``"replay"``.
    subject : str
        Name of the judged object, for people.
    findings : tuple of Finding
        Broken invariants; empty if all checks hold.
    checked : tuple of str
        Ids of the decided invariants.
    not_checked : mapping of str to str
        Ids of undecided invariants, each with the reason.
    seconds : float
        Time of the tool.
    scope : str
        Part of the trials that the verdict covers; empty if it covers all.
    undecided : str
        Reason why "proved" would promise too much; empty if it does not.
    facts : mapping
        Further results, such as counts of bytes or cases; JSON.
    required : tuple of str
        Ids that must be among `checked`, see `require`.

    Examples
    --------
    >>> report = Report("lint", "plan.json", checked=("OWN",), not_checked={"COV": "no segments"})
    >>> report.verdict, report.exit_code
    ('proved', 0)
    """

    tool: str
    subject: str
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    scope: str = ""
    undecided: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids that are required and undecided."""
        return tuple(id for id in self.required if id not in self.checked)

    @property
    def verdict(self) -> str:
        """``"proved"``, ``"refuted"``, or ``"not judged"`` if a required decision is missing."""
        if self.findings:
            return "refuted"
        nothing = bool(self.not_checked) and not self.checked
        return "not judged" if self.missing or self.undecided or nothing else "proved"

    @property
    def proved(self) -> bool:
        """Whether no check failed and all required checks were made."""
        return self.verdict == "proved"

    @property
    def exit_code(self) -> int:
        """0 proved, 1 refuted, 2 not judged."""
        return {"proved": PROVED, "refuted": REFUTED}.get(self.verdict, NOT_USABLE)

    def text(self) -> str:
        """Return the report as text: findings, the verdict, and the limits of the verdict."""
        parts = [finding.text() for finding in self.findings]
        many = f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}"
        verdict, checked = self.verdict, " ".join(self.checked)
        if verdict == "proved" and checked:
            verdict += f": {checked}"
        elif verdict == "refuted":
            verdict += f", {many}"
        elif self.missing:
            verdict += f", {' '.join(self.missing)} not checked"
        verdict += f", {self.scope}" * bool(self.scope)
        lines = [f"{self.subject}: {verdict} ({self.seconds:.1f} s)"]
        if self.undecided:
            lines.append(f"  not judged: {self.undecided}")
        if checked and not self.proved:
            lines.append(f"  checked: {checked}")
        lines += [f"  not checked: {id} ({reason})" for id, reason in self.not_checked.items()]
        return "\n\n".join([*parts, "\n".join(lines)])

    def as_dict(self) -> dict[str, Any]:
        """Return one JSON document."""
        return {
            "schema": SCHEMA, "proved": self.proved, "verdict": self.verdict, **asdict(self)
        }  # fmt: skip

    def to_json(self) -> str:
        """Return `as_dict` as text; ValueError for NaN and infinity."""
        return json.dumps(self.as_dict(), allow_nan=False, indent=2)
