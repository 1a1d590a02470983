# SPDX-License-Identifier: Apache-2.0
"""Guide for a first replay: says what it has shown, and what to try next."""

from __future__ import annotations

import textwrap

from ..records import ReplayReport
from .summary import summarize

_WIDTH = 100


def guide_lines(report: ReplayReport, width: int | None, *, has_page: bool = False) -> list[str]:
    """Return three texts wrapped to `width` columns; `has_page`: whether --html was given."""
    s, options = summarize(report), report.options
    seen = (
        f"{report.num_requests} requests went through {options.num_processes} processes in "
        f"{s['batches']} batches; {100 * s['hit_rate']:.0f} % of their tokens were in the cache. "
        + _verdict(report)
    )
    shares = (
        f"{options.strategy} gave the busiest rank {s['balance_pairs']:.3f} times the mean number "
        "of query-key pairs"
    )
    if s["speedup_over_torch"]:
        shares += f", and torch took {s['speedup_over_torch']:.1f} times as long for attention"
    other = "contiguous" if options.strategy != "contiguous" else "zigzag"
    following = (
        f"cpattn replay --strategy {other} (how even is that?), "
        + ("" if has_page else "cpattn replay --html report.html (plots), ")
        + "cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4 (who computes what)"
    )
    texts = {"seen": seen, "why": f"{shares}.", "next": following}
    lines = []
    for name, text in texts.items():
        lines += textwrap.wrap(
            text,
            max(width or _WIDTH, 20),
            initial_indent=f"{name:<6}",
            subsequent_indent=6 * " ",
            break_on_hyphens=False,
        )
    return lines


def _verdict(report: ReplayReport) -> str:
    if report.tolerance is None:
        return "Nothing was compared."
    if report.passed:
        return "What was compared is what one process computes without a cache, but for roundings."
    return "What was compared is NOT what one process computes."
