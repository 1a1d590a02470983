# SPDX-License-Identifier: Apache-2.0
"""Report on the ranks' KV pools, and on the bytes that ranks send each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..records import ReplayReport


def summarize_pools(report: ReplayReport) -> dict[str, Any]:
    """Return memory of the pools, sent bytes, and the number of batches of each exchange."""
    sent = [b.rank_sent_bytes for b in report.batches if b.rank_sent_bytes]
    by_rank = [sum(rank) for rank in zip(*sent, strict=True)]
    return {
        "placement": report.options.placement,
        "exchanges": dict(Counter(batch.exchange for batch in report.batches)),
        "sent_bytes": sum(by_rank),
        "sent_bytes_per_rank": max(by_rank, default=0),
        "pool_bytes": sum(report.pool_bytes),
        "pool_bytes_per_rank": max(report.pool_bytes, default=0),
        "speedup_over_replicated": _speedup(report),
    }


def _speedup(report: ReplayReport) -> float | None:
    """Return the speedup of passes over replicated pools; None if these did not run."""
    other = report.replicated
    return other.run_seconds / report.run_seconds if other else None


def pool_figures(report: ReplayReport) -> list[tuple[str, str]]:
    """Return the summary of pools as (name, text) lines."""
    s, options = summarize_pools(report), report.options
    tokens = f"{options.num_pages * options.page_size:,} tokens"
    held = f"a share of {tokens}, {options.placement}" if options.is_sharded else f"all {tokens}"
    lines = [
        (
            "KV pools",
            f"{_mib(s['pool_bytes_per_rank'])} in a rank, which has {held}; "
            f"{_mib(s['pool_bytes'])} in all",
        )
    ]
    if options.cp_size > 1:
        ways = ", ".join(
            f"{name} in {n} batch{'es' * (n > 1)}" for name, n in sorted(s["exchanges"].items())
        )
        lines.append(
            (
                "exchange",
                f"{_mib(s['sent_bytes'])} sent by all ranks, {_mib(s['sent_bytes_per_rank'])} by "
                f"the busiest; {ways}",
            )
        )
    if options.hosts > 1:
        rate = f"{options.link_gbps:g} Gbit/s" if options.link_gbps else "no limit"
        ranks = options.num_ranks // options.hosts
        lines.append(
            (
                "hosts",
                f"{options.hosts} network namespaces of {ranks} rank{'s' * (ranks > 1)}, links of "
                f"{rate}; {_mib(max(report.link_bytes, default=0))} came by the busiest, baseline "
                "and set-up included",
            )
        )
    other = report.replicated
    if other:
        lines.append(
            (
                "replicated",
                f"{other.run_seconds:.2f} s for {other.new_tokens:,} new tokens: "
                f"{s['speedup_over_replicated']:.2f} times as long; pools of "
                f"{_mib(other.pool_bytes)} in a rank, peak {_mib(other.peak_bytes)}, "
                f"{_mib(other.sent_bytes)} sent; {other.compared_rows:,} rows differ by at most "
                f"{other.difference:.1e}",
            )
        )
    return lines


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
