# SPDX-License-Identifier: Apache-2.0
"""Implementations of one job, the checks of their results, and their bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.harness.figures import Row, is_ours
from cpattn import _core

#: The rows of a comparison that have a time, by implementation.
Timed = Mapping[str, Row]


class Wrong(Exception):
    """A result that no rounding explains."""


@dataclass(frozen=True)
class Bar:
    """A figure that one implementation has to reach: at least `limit`, or at most."""

    of: str
    name: str
    limit: float
    value: Callable[[Timed], float]  # KeyError where a peer is missing: nothing to compare with
    at_least: bool = True

    def judge(self, timed: Timed) -> Row:
        value = self.value(timed)
        met = value >= self.limit if self.at_least else value <= self.limit
        return {
            "name": self.name,
            "value": value,
            "limit": self.limit,
            "at_least": self.at_least,
            "met": met,
        }


@dataclass(frozen=True)
class Comparison:
    """Implementations of one job on one set of inputs; the first is cpattn's.

    ``check(name, result)`` is the relative error of a result, or raises Wrong.
    """

    part: str
    case: dict[str, Any]  # what tells it from others, with the number of threads if not one
    implementations: Mapping[str, Callable[[], Any]]
    check: Callable[[str, Any], float]
    work: tuple[float, str] | None  # of a call, in units of 10^9, such as (12.5, "GFLOP")
    items: tuple[int, str]  # of a call, such as (4096, "element")
    bars: tuple[Bar, ...] = ()
    peak: Callable[[], float] | None = None  # of the machine, in work per second; None: dot product

    @property
    def threads(self) -> int:
        """The threads of a case, by default one."""
        threads: int = self.case.get("threads", 1)
        return threads

    @property
    def has_share(self) -> bool:
        """Whether the work is a share of the peak, which otherwise only shows busy neighbours."""
        return self.work is not None and (self.peak is not None or self.work[1] == "GFLOP")


def peak_of(comparison: Comparison) -> Callable[[], float]:
    """The comparison's own peak, or the flop/s of the bfloat16 dot product."""
    if comparison.peak is not None:
        return comparison.peak
    return partial(_core.measure_peak, "bfloat16", comparison.threads)


def percent_of_peak(of: str, limit: float) -> Bar:
    return Bar(of, "of peak, %", limit, lambda timed: timed[of]["percent_of_peak"])


def times_as_fast(of: str, name: str, limit: float, *peers: str) -> Bar:
    """A bar against the fastest peer; all peers must be present."""

    def value(timed: Timed) -> float:
        return min(timed[peer]["median"] for peer in peers) / timed[of]["median"]

    return Bar(of, f"times as fast as {name}", limit, value)


def ahead_of_all(of: str) -> Bar:
    """A bar against the fastest peer; missed only if a peer is present and ahead."""

    def value(timed: Timed) -> float:
        times = [row["median"] for row in timed.values() if not is_ours(row)]
        if not times:
            raise KeyError("nobody to compare with")
        return float(min(times) / timed[of]["median"])

    return Bar(of, "times as fast as the best peer", 1.0, value)


def nanoseconds(of: str, item: str, limit: float) -> Bar:
    return Bar(of, f"ns per {item}", limit, lambda timed: timed[of]["ns_per_item"], at_least=False)


def percent_longer(of: str, than: str, limit: float) -> Bar:
    """The percentage by which `of` takes longer than another implementation."""

    def value(timed: Timed) -> float:
        return 100 * (timed[of]["median"] / timed[than]["median"] - 1)

    return Bar(of, f"longer than {than}, %", limit, value, at_least=False)


def microseconds(of: str, limit: float) -> Bar:
    return Bar(of, "µs", limit, lambda timed: 1e6 * timed[of]["median"], at_least=False)


def equal(assert_same: Callable[[Any, Any], None], expected: Any) -> Callable[[str, Any], float]:
    """A check by an assertion that two results are the same; the error is zero."""

    def check(name: str, result: Any) -> float:
        try:
            assert_same(result, expected)
        except AssertionError as error:
            raise Wrong(" ".join(str(error).split())) from error
        return 0.0

    return check
