# SPDX-License-Identifier: Apache-2.0
"""Checks as values, and helpers for their findings and phrases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...findings import Finding
from ..model import Plan


@dataclass(frozen=True)
class Check:
    """Check of a part of an invariant.

    Attributes
    ----------
    invariant : str
        Id of the invariant.
    part : str
        Part of the document that the check needs, by its name in reports.
    run : callable
        Takes a plan, returns findings; raises `model.Absent` if the document lacks data.
    """

    invariant: str
    part: str
    run: Callable[[Plan], list[Finding]]


def finding(
    id_kind: str,
    what: str,
    where: str,
    ranks: Iterable[int] = (),
    picture: str = "",
    **details: Any,
) -> list[Finding]:
    """Return one finding, as a list; `id_kind` has the form ``"own-token"``.

    Numbers in details become Python numbers, which JSON knows.
    """
    plain = {name: _plain(value) for name, value in details.items()}
    invariant = id_kind.partition("-")[0].upper()
    numbers = tuple(sorted({int(rank) for rank in ranks}))
    return [Finding(invariant, what, where, numbers, picture, kind=id_kind, details=plain)]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.item() if hasattr(value, "item") else value


def many(count: int, what: str) -> str:
    """Return a count with its noun, such as "3 ranks" or "no rank"."""
    return f"{count} {what}{'s' * (count != 1)}" if count else f"no {what}"


def more(count: int, what: str) -> str:
    """Return a phrase for the rest of several, such as ", and 3 more tokens"; "" for none."""
    return f", and {count} more {what}{'s' * (count != 1)}" if count > 0 else ""
